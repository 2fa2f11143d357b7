"""Compiled programs, kept on disk between processes."""

import os
import pathlib

import jax
from absl import logging


def use_compilation_cache() -> str | None:
    """Keeps compiled programs on disk between processes, in JAX's own folder if one is set.

    Returns:
      The folder: that of ``JAX_COMPILATION_CACHE_DIR`` or ``jax_compilation_cache_dir`` if set,
      else ``~/.cache/specsamp/xla``; None if ``JAX_ENABLE_COMPILATION_CACHE`` is off, or if no
      folder can be written.
    """
    folder = find_compilation_cache()
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
    return folder


def find_compilation_cache() -> str | None:
    """Returns the folder that `use_compilation_cache` would use; nothing is kept in it yet."""
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = jax.config.jax_compilation_cache_dir or _users_folder()
    return None if folder is None else str(folder)


def _users_folder() -> pathlib.Path | None:
    """Makes the user's folder of compiled programs; returns None, with a warning, where it cannot
    be written.
    """
    try:
        folder = (
            pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
            / "specsamp"
            / "xla"
        )
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        logging.warning(
            "compiled programs are not kept: %s; set JAX_COMPILATION_CACHE_DIR to a folder", error
        )
        return None
    if is_new:
        logging.info("specsamp keeps compiled programs in %s", folder)
    return folder
