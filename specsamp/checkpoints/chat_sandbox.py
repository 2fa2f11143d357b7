"""Runs chat templates in a separate process: `python chat_sandbox.py SECONDS BYTES`, started by
chat.py.

A template is a Jinja program by the author of a checkpoint. It runs in the sandbox of jinja2, with
the extensions, filters and functions that it has in transformers. Limits of the operating system on
this process end programs that use too much memory or time.

Each line of the input is a JSON list, the program and its variables. Each line of the output is a
JSON object, the "text" that the program wrote or the "error" that it ended with. If there is not
enough memory to write it, this process ends with the status 3.
"""

import contextlib
import datetime
import functools
import json
import resource
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

OUT_OF_MEMORY = 3
MAX_CHARACTERS = 2**24  # of the text


class Generation(jinja2.ext.Extension):
    """Ignores the tags {% generation %} and {% endgeneration %}, which mark training text."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True))


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Returns a value as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise jinja2.TemplateError(message)


def strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=8)
def compile_template(source):
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox.from_string(source)


def render(source, variables):
    try:
        text = compile_template(source).render(**variables)
        return (
            {"text": text}
            if len(text) <= MAX_CHARACTERS
            else {"error": f"it writes {len(text):,} characters"}
        )
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # a program can fail in any way
        return {"error": str(error) or type(error).__name__}


def answer_requests(seconds, size):
    # Programs that have started libtpu ignore this signal, and their children inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # macOS does not limit memory; there the time is the only limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            answer = json.dumps(render(*json.loads(line)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(answer, flush=True)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    answer_requests(float(sys.argv[1]), int(sys.argv[2]))
