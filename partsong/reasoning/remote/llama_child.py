"""Runs llama.cpp's server from the `xllamacpp` package as a process of its own; started by path, see `servers`."""

from __future__ import annotations

import json
import signal
import sys

__all__ = ["main"]


def main(options: str) -> None:
    """Serves until it gets a signal to end.

    Args:
        options: JSON with ``model``, a GGUF file; ``alias``, its name; ``port``; ``slots``, calls at a time;
            ``context``, tokens of each; ``threads``.
    """
    import xllamacpp

    settings = json.loads(options)
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.model_alias = {settings["alias"]}
    params.hostnames, params.port = ["127.0.0.1"], settings["port"]
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.endpoint_slots = True
    # Other pages in a browser on this machine must not reach the server, and it needs no page of its own.
    params.cors_origins, params.ui = f"http://127.0.0.1:{settings['port']}", False
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server  # ends its threads in good order


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1])
