"""Finds the folder of a checkpoint, on a disk or in a bucket, or downloads it from the Hugging Face
hub.
"""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from specsamp import storage, validate
from specsamp.checkpoints.chat import TOOL_TEMPLATE
from specsamp.checkpoints.safetensors_io import INDEX, NO_WEIGHTS, SINGLE, Tensor, read_index

# These files suffice to check whether a checkpoint can be read: weights are downloaded last.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SMALL_FILES += ("special_tokens_map.json", "chat_template.jinja", TOOL_TEMPLATE, INDEX)

ID = re.compile(r"[\w.-]+/[\w.-]+")  # of a model, or of a data set, of the hub
ASSETS = pathlib.Path(__file__).parent / "assets"  # of models and heads that come with the package


def find_folder(name: str | os.PathLike) -> tuple[epath.Path, bool]:
    """Returns the folder of a checkpoint's small files, and whether they come from the hub.

    Args:
      name: a folder, on a disk or in a bucket; a head that comes with the package, such as
        ``smollm2-head``; or the id of a model of the hub.

    Raises:
      FileNotFoundError: the folder or the model does not exist, or has no config.json.
      ValueError: the name may be a model of the hub, whose library is not installed.
    """
    name = validate.path("a checkpoint", name)
    folder = storage.place(name)
    if (folder / "config.json").exists():
        return folder, False
    if folder.exists() or storage.in_bucket(name):
        raise FileNotFoundError(
            f"{folder} has no config.json: it is not a checkpoint in the format of Hugging Face"
        )
    if (ASSETS / name / "config.json").exists():
        return storage.place(str(ASSETS / name)), False
    if not ID.fullmatch(name):
        raise FileNotFoundError(
            f"no folder {name!r}; give one, or the id of a model of the hub such as "
            "Qwen/Qwen2.5-0.5B"
        )
    return _download(name, SMALL_FILES), True


def download_weights(name: str, *others: str) -> epath.Path:
    """Downloads the tensors of a model of the hub, and returns their folder.

    Args:
      others: alternatives to the file `SINGLE`; the first existing file is used.

    Raises:
      FileNotFoundError: the download fails.
    """
    folder = _download(name, [INDEX])
    if (folder / INDEX).exists():
        return _download(name, read_index(folder))
    for file in (SINGLE, *others):
        folder = _download(name, [file])
        if (folder / file).exists():
            break
    return folder


def read_headers(name: str) -> dict[str, Tensor]:
    """Returns the tensors of a model of the hub without downloading them: their values cannot be
    read.

    Raises:
      FileNotFoundError: the download of the headers fails. ValueError: the model has no
        safetensors.
    """
    hub = library(name)
    try:
        files = hub.get_safetensors_metadata(name).files_metadata
    except hub.errors.NotASafetensorsRepoError as error:
        raise ValueError(f"{name} has {NO_WEIGHTS}") from error
    except Exception as error:  # of the network, of the hub, of access rights
        raise FileNotFoundError(
            f"the hub did not give the headers of {name} ({_told(error)})"
        ) from error
    return {
        tensor: Tensor(file=epath.Path(file), kind=info.dtype, shape=tuple(info.shape), offset=0)
        for file, content in files.items()
        for tensor, info in content.tensors.items()
    }


def why_not(name: str) -> str | None:
    """Returns why a model of the hub cannot be downloaded (missing, gated, no access); None: it
    can, or it is a folder.

    Raises:
      ConnectionError: the hub does not answer. ValueError: its library is not installed.
    """
    if storage.place(name).exists() or not ID.fullmatch(name):
        return None
    hub = library(name)
    try:
        hub.auth_check(name)  # a gated model is visible to all users but not readable for all
    except hub.errors.GatedRepoError:
        return "gated: accept its licence on its page, then hf auth login"
    except hub.errors.RepositoryNotFoundError:
        return "not on the hub, or private: then hf auth login"
    except (
        hub.errors.HfHubHTTPError,
        ValueError,
    ) as error:  # the second: no name that a model can have
        return f"the hub does not give it ({_told(error)})"
    except Exception as error:  # of the library that it makes requests with
        raise ConnectionError(
            f"the hub cannot be reached to look up names ({_told(error)}): check network and "
            "HF_HUB_OFFLINE"
        ) from error
    return None


def _told(error: Exception) -> str:
    """Returns the first line of an error, without links and ids of requests."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def library(name: str) -> Any:
    """Imports the hub's library; raises ValueError if it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"no folder {name!r}; to look it up on the hub, install its library: pip install "
            "huggingface_hub"
        ) from error
    return huggingface_hub


def _download(name: str, files: Sequence[str]) -> epath.Path:
    """Downloads files of a model into the cache of the hub's library, and returns their folder."""
    hub = library(name)
    try:
        # Subfolders hold the same model in other formats.
        found = hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=["*/*"])
    except Exception as error:  # of the network, of the hub, of access rights
        raise FileNotFoundError(
            f"no folder {name!r}, and the hub did not give it ({type(error).__name__}: {error}). A "
            "gated model needs its licence accepted on its page and a token: hf auth login"
        ) from error
    return epath.Path(found)
