"""A program: give each line of stdin to torch's own parser, each in a process of its own, and print what it says."""

import os
import sys
import warnings

import torch


def main() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin.read().splitlines():
        sys.stdout.flush()
        pid = os.fork()  # settings stay, so that one line would change the reading of the next
        if pid == 0:
            try:
                torch._C._accelerator_setAllocatorSettings(line)
                print("accepted", flush=True)
            except (RuntimeError, ValueError, IndexError):
                print("refused", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
