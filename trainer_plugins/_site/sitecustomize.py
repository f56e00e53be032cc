"""Attaches callbacks when `transformers.trainer` is imported, under `trainer-plugins exec`.

Python itself reads this file when it starts. It imports nothing that Python has not imported
already. Whatever goes wrong is one line on stderr, and the program goes on. Any Python may be
started there, so this file works from 2.7 on: no annotations, no f-strings.
"""

import os
import sys


def _attach():  # type: () -> None
    try:
        import importlib
        import json

        attachment = importlib.import_module("trainer_plugins.plug_in.attachment")
        reported = importlib.import_module("trainer_plugins.plug_in.reported")
        if not attachment.is_attached():  # what the program attached itself has precedence
            attachment.attach(**json.loads(os.environ["TRAINER_PLUGINS_ATTACH"]))
        reported.report(reported.IMPORTED)
    except Exception as error:  # noqa: BLE001 # the program is not ours to break
        _say(error)


def _prepare(who, module, function):  # type: (str, str, str) -> object
    def prepare():  # type: () -> None
        try:
            import importlib

            getattr(importlib.import_module(module), function)()
        except Exception as error:  # noqa: BLE001 # what is not prepared must not go on
            sys.stderr.write(who + ": " + type(error).__name__ + ": " + str(error) + "\n")
            sys.stderr.flush()
            os._exit(1)

    return prepare


def _say(error):  # type: (Exception) -> None
    reason = " ".join(str(error).split())
    if "trainer_plugins" in reason:
        reason += "; install trainer-plugins in it, too"
    words = "trainer_plugins: nothing was attached in this Python (%s): %s\n"
    sys.stderr.write(words % (sys.executable, reason))


def _go_on_to_the_users_own():  # type: () -> None
    """Import the sitecustomize that this one hides, if there is one; it may raise as usual."""
    here = os.path.dirname(os.path.abspath(__file__))
    ours, place = sys.modules.pop("sitecustomize"), sys.path.index(here) if here in sys.path else 0
    sys.path[:] = [entry for entry in sys.path if entry != here]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        # In Python 2 the name is only in the message.
        missing = getattr(error, "name", None) or str(error).split()[-1]
        if missing != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
        sys.path.insert(place, here)


# Rank 0 runs alone, and a launcher is content with ranks that end well.
if "TRAINER_PLUGINS_DRYCUDA_ALONE" in os.environ and os.environ.get("RANK", "0") != "0":
    os._exit(0)
if "TRAINER_PLUGINS_DRYCUDA" in os.environ and sys.version_info >= (3, 10):
    import ctypes

    from trainer_plugins_on_import import call_when_imported  # type: ignore[import-not-found]

    # Where this is not called, the dry card's libraries end a Python that imports torch (core.cpp).
    getattr(ctypes.CDLL(None), "drycuda_prepared", int)()
    inside = "trainer_plugins.inside."
    # A module that imports torch is under way when torch has been imported: all are named before.
    for name, place, function in (
        ("torch", "start", "start"),
        ("deepspeed.ops.adam.cpu_adam", "cheap", "skip_adam_of_the_processor"),
        ("safetensors.torch", "safety", "save_holes"),
        ("torch.distributed.checkpoint.filesystem", "safety", "load_no_parts"),
        ("transformers.training_args", "safety", "protect_arguments"),
        ("transformers.trainer", "observe", "watch_trainers"),
        ("transformers.modeling_utils", "weights", "make_those_that_are_missing"),
        ("transformers.generation.stopping_criteria", "shapes", "generate_to_the_end"),
    ):
        call_when_imported(name, _prepare("dry CUDA", inside + place, function))
    fitted = "trainer_plugins.plug_in.fitted"
    call_when_imported("transformers.trainer", _prepare("dry CUDA", fitted, "give_adapters"))
# No transformers with a Trainer runs on older Python.
if "TRAINER_PLUGINS_ATTACH" in os.environ and sys.version_info >= (3, 6):
    try:
        from trainer_plugins_on_import import call_when_imported

        call_when_imported("transformers.trainer", _attach)
        if "TRAINER_PLUGINS_ARGUMENTS" in os.environ:
            for name, function in (
                ("transformers.training_args", "change_arguments"),
                ("transformers.trainer", "give_adapters"),
            ):
                fitted = "trainer_plugins.plug_in.fitted"
                call_when_imported(name, _prepare("trainer-plugins exec --fit", fitted, function))
    except Exception as error:  # noqa: BLE001
        _say(error)
if __name__ == "sitecustomize":
    _go_on_to_the_users_own()
