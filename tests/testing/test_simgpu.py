"""An unmodified Trainer on the simulated accelerator. Enabling it is for the whole process, so each
story is a script that runs in a process of its own, through the runner, as a user's script
would."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from trainer_plugins.testing import simgpu
from trainer_plugins.testing.card import SimCard
from trainer_plugins.units import MIB

REPOSITORY = Path(__file__).parents[2]
RUNNER = ["-m", "trainer_plugins.testing.simgpu"]


@pytest.fixture(scope="module", autouse=True)
def _needs_simgpu():
    reason = simgpu.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


# What the stories share: tiny models, rows that are the same everywhere, and a Trainer with little
# but its defaults.
PRELUDE = """
import json, os, sys
import torch
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config,
                          T5ForConditionalGeneration, Trainer, TrainingArguments)

def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=4))

def rows(length=64, count=64):
    rows = [torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]

def trainer(model, length=64, **arguments):
    defaults = dict(output_dir="out", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
                    save_strategy="no", report_to=[], disable_tqdm=True)
    return Trainer(model, TrainingArguments(**{**defaults, **arguments}), train_dataset=rows(length))

def losses(trainer, **arguments):
    trainer.train(**arguments)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

def report(**facts):  # in one write, as two ranks write to one pipe
    sys.stdout.flush()
    os.write(1, f"\\nFACTS {json.dumps(facts)}\\n".encode())
"""


# For the stories that need torch only, which starts in a third of the time.
SMALL_REPORT = """
import json, os, sys, time
import torch
from trainer_plugins.testing import simgpu
MIB = 1 << 20
def report(**facts):  # in one write, as two ranks write to one pipe
    sys.stdout.flush()
    os.write(1, f"\\nFACTS {json.dumps(facts)}\\n".encode())
def fill(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="simgpu")
def out_of_memory(mib):
    try:
        fill(mib)
    except torch.OutOfMemoryError as error:
        return str(error)
    return None
"""


def environment(**changes: str) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY)}
    kept = {key: value for key, value in os.environ.items() if key not in ("SIMGPU_CARD", "CI")}
    return {**kept, **own, **changes}


def run(
    tmp_path: Path,
    story: str,
    *,
    capacity: str = "1GiB",
    options: Sequence[str] = (),
    prelude: str = PRELUDE,
    launcher: Sequence[str] = (),
    env: dict[str, str] | None = None,
    fresh: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a story and return its finished process; `facts` says what it reported."""
    script = tmp_path / "story.py"
    script.write_text(prelude + textwrap.dedent(story))
    command = [sys.executable, *launcher, *RUNNER, "--capacity", capacity, *options, str(script)]
    return processes.run(command, cwd=tmp_path, environ=environment(**(env or {})), fresh=fresh)


def facts(process: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert process.returncode == 0, process.stderr[-3000:]
    return [
        json.loads(line.removeprefix("FACTS "))
        for line in process.stdout.splitlines()
        if line.startswith("FACTS ")
    ]


def test_a_trainer_that_does_not_fit_dies_as_on_cuda(tmp_path):
    process = run(
        tmp_path, "trainer(llama(), per_device_train_batch_size=16).train()", capacity="12MiB"
    )
    assert process.returncode == 1, process.stderr[-3000:]
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    assert " GPU 0 has a total capacity of 12.00 MiB of which " in last
    assert " Including non-PyTorch memory, this process has " in last
    assert (
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        in last
    )


@pytest.mark.all
def test_auto_find_batch_size_recovers(tmp_path):
    story = """
    t = trainer(llama(), per_device_train_batch_size=12, auto_find_batch_size=True)
    t.train()
    stats = torch.accelerator.memory_stats()
    report(device=str(t.model.device), steps=t.state.global_step, batch_size=t._train_batch_size,
           ooms=stats["num_ooms"], retries=stats["num_alloc_retries"])
    """
    (found,) = facts(run(tmp_path, story, capacity="10MiB"))
    assert found["device"] == "simgpu:0"
    assert found["steps"] == 4
    assert found["batch_size"] < 12
    assert found["ooms"] >= 1
    assert found["retries"] >= found["ooms"]


def test_training_is_that_of_the_cpu(tmp_path):
    """The same losses, whichever optimizer; autocast and checkpointing do what they do on a card."""
    story = """
    dtypes = set()
    def trained(**arguments):
        model = llama()
        model.lm_head.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
        dtypes.clear()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        t = trainer(model, **arguments)
        result = losses(t)
        return dict(device=str(next(model.parameters()).device), losses=result, dtypes=sorted(dtypes),
                    weights=[p.detach().double().sum().item() for p in model.parameters()],
                    peak=torch.accelerator.max_memory_allocated())

    report(cpu=trained(use_cpu=True), foreach=trained(optim="adamw_torch"), fused=trained(optim="adamw_torch_fused"),
           bf16=trained(bf16=True), checkpointing=trained(gradient_checkpointing=True),
           accumulated=trained(per_device_train_batch_size=2, gradient_accumulation_steps=2))
    """
    (found,) = facts(run(tmp_path, story))
    assert found["cpu"]["device"] == "cpu"
    for name in ("foreach", "fused", "checkpointing", "accumulated"):
        assert found[name]["device"] == "simgpu:0"
        # transformers 4 rounds the losses that it logs to four digits
        assert found[name]["losses"] == pytest.approx(found["cpu"]["losses"], abs=1.1e-4), name
    assert found["fused"]["weights"] == pytest.approx(found["foreach"]["weights"], abs=1e-3)
    assert found["foreach"]["weights"] == pytest.approx(found["cpu"]["weights"], abs=1e-3)
    assert found["foreach"]["dtypes"] == ["torch.float32"]
    assert found["bf16"]["dtypes"] == ["torch.bfloat16"]
    assert found["bf16"]["losses"] == pytest.approx(found["cpu"]["losses"], abs=0.02)
    assert found["bf16"]["losses"] != found["foreach"]["losses"]
    assert found["checkpointing"]["peak"] < 0.9 * found["foreach"]["peak"]


def test_one_optimizer_step_is_the_same_fused_foreach_and_on_the_cpu(tmp_path):
    story = """
    def stepped(device, **arguments):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 32).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, **arguments)
        for i in range(5):
            optimizer.zero_grad()
            layer(torch.ones(8, 64, device=device) * (i + 1)).pow(2).mean().backward()
            optimizer.step()
        assert layer.weight.device.type == device
        return layer.weight.detach().cpu()

    reference = stepped("cpu", foreach=False)
    for name in ("foreach", "fused"):
        report(name=name, difference=(stepped("simgpu", **{name: True}) - reference).abs().max().item())
    """
    foreach, fused = facts(run(tmp_path, story, prelude=SMALL_REPORT))
    assert foreach["difference"] < 1e-6
    assert fused["difference"] < 1e-6


@pytest.mark.all
def test_other_models_generation_and_resuming(tmp_path):
    story = """
    def gpt2():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0,
                                          embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    def t5():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(T5Config(vocab_size=256, d_model=32, d_kv=16, d_ff=64, num_layers=2,
                                                   num_heads=2, decoder_start_token_id=0, dropout_rate=0))
    for build in (gpt2, t5):
        # Not Adam: it makes a whole step of a gradient that is zero but for rounding, as that of GPT-2's key biases.
        expected = losses(trainer(build(), use_cpu=True, optim="sgd", learning_rate=0.1))
        t = trainer(build(), dataloader_num_workers=1, optim="sgd", learning_rate=0.1)
        embedding, head = t.model.get_input_embeddings().weight, t.model.get_output_embeddings().weight
        report(cpu=expected, simgpu=losses(t), device=str(t.model.device), tied=embedding is head)

    prompt, model = torch.randint(3, 256, (2, 5)), gpt2()
    for arguments in (dict(do_sample=False), dict(do_sample=True), dict(num_beams=3)):
        torch.manual_seed(1)
        expected = model.to("cpu").generate(prompt, max_new_tokens=8, **arguments)
        torch.manual_seed(1)
        generated = model.to("simgpu").generate(prompt.to("simgpu"), max_new_tokens=8, **arguments)
        report(device=generated.device.type, same=torch.equal(expected, generated.cpu()))

    whole = losses(trainer(llama(), save_strategy="steps", save_steps=2))
    resumed = trainer(llama(), output_dir="other")
    after = losses(resumed, resume_from_checkpoint="out/checkpoint-2")
    report(whole=whole, resumed=after, device=str(resumed.model.device))
    """
    *models, greedy, sampled, beams, resumed = facts(run(tmp_path, story))
    for model in models:
        assert model["device"] == "simgpu:0"
        assert model["tied"], "moving a model must not take its tied weights apart"
        assert model["simgpu"] == pytest.approx(model["cpu"], abs=1e-5)
    assert greedy == sampled == beams == {"device": "simgpu", "same": True}
    assert resumed["device"] == "simgpu:0"
    assert resumed["resumed"] == pytest.approx(resumed["whole"], abs=1e-6)


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory):
    story = (
        "t = trainer(llama(), use_cpu=True)\nreport(losses=losses(t), device=str(t.model.device))"
    )
    (alone,) = facts(run(tmp_path_factory.mktemp("alone"), story))
    assert alone["device"] == "cpu"
    return alone["losses"]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
@pytest.mark.all(but=1)
def test_two_ranks_train_as_one(tmp_path, launcher, losses_of_one_rank):
    words = {
        "torchrun": "torch.distributed.run --nproc-per-node 2 --master-port",
        "accelerate": "accelerate.commands.launch --num_processes 2 --num_machines 1 --multi_gpu"
        " --mixed_precision no --dynamo_backend no --main_process_port",
    }
    command = ["-m", *words[launcher].split(), processes.free_port()]
    story = """
    t = trainer(llama(), per_device_train_batch_size=2)
    t.train()
    from trainer_plugins.testing import simgpu
    report(world=t.args.world_size, backend=torch.distributed.get_backend(), wrapper=type(t.model_wrapped).__name__,
           device=str(t.model.device), losses=[e["loss"] for e in t.state.log_history if "loss" in e],
           card=simgpu.card().uuid, processes=[p.pid == os.getpid() for p in simgpu.card().processes()])
    gathered = [torch.zeros(2, device="simgpu") for _ in range(2)]
    torch.distributed.all_gather(gathered, torch.full((2,), float(t.args.process_index), device="simgpu"))
    objects = [None, None]
    torch.distributed.all_gather_object(objects, t.args.process_index)
    torch.distributed.barrier()
    assert [g.tolist() for g in gathered] == [[0, 0], [1, 1]] and objects == [0, 1]
    """
    ranks = facts(run(tmp_path, story, launcher=command))
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["world"], rank["backend"], rank["wrapper"]) == (
            2,
            "gloo",
            "DistributedDataParallel",
        )
        assert (rank["device"], rank["processes"]) == ("simgpu:0", [True])
        assert rank["losses"] == pytest.approx(losses_of_one_rank, abs=1e-5)
    assert ranks[0]["card"] != ranks[1]["card"]


def test_a_foreign_process_takes_what_we_then_lack(tmp_path):
    SimCard.create(tmp_path / "card", 100 * MIB).hold(4242, 70 * MIB, "python infer.py")
    story = """
    report(free=torch.simgpu.mem_get_info()[0], error=out_of_memory(40))
    simgpu.card().release(4242)
    report(free=torch.simgpu.mem_get_info()[0], error=out_of_memory(40))
    held = fill(40)
    try:
        simgpu.card().hold(4242, 70 * MIB, "python infer.py")
        report(refused=False)
    except ValueError:
        report(refused=True)
    """
    process = run(
        tmp_path,
        story,
        prelude=SMALL_REPORT,
        capacity="100MiB",
        options=["--card", str(tmp_path / "card")],
    )
    with_it, without, intruder = facts(process)
    assert with_it["free"] == 30 * MIB
    assert "Tried to allocate 40.00 MiB." in with_it["error"]
    assert "which 30.00 MiB is free. " in with_it["error"]
    assert (
        "Process 4242 has 70.00 MiB memory in use. " in with_it["error"]
    )  # listed by pid: before us, or behind
    assert without == {"free": 100 * MIB, "error": None}
    assert intruder == {"refused": True}, "an intruder cannot take what we hold"


@pytest.mark.all
def test_two_processes_share_a_card(tmp_path):
    card = SimCard.create(tmp_path / "card", 100 * MIB)
    story = """
    import subprocess
    if len(sys.argv) == 1:
        held = fill(60)
        command = [sys.executable, "-m", "trainer_plugins.testing.simgpu", __file__, "second"]
        subprocess.run(command, check=True)
        report(first=torch.simgpu.mem_get_info()[0])
    else:
        report(free=torch.simgpu.mem_get_info()[0], error=out_of_memory(60), parent=os.getppid(),
               total=torch.simgpu.get_device_properties().total_memory)
        held = fill(20)
    """
    process = run(
        tmp_path,
        story,
        prelude=SMALL_REPORT,
        capacity="100MiB",
        env={"SIMGPU_CARD": str(tmp_path / "card")},
        fresh="the number of a parent is asked for",
    )
    second, first = facts(process)
    assert (second["free"], second["total"]) == (40 * MIB, 100 * MIB)
    assert f"Process {second['parent']} has 60.00 MiB memory in use." in second["error"]
    assert first["first"] == 40 * MIB, "what a process held is free when it has gone"
    assert card.used_bytes == 0


def test_a_collective_lets_go_of_its_tensors_when_it_was_waited_for(tmp_path):
    story = """
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/found", rank=0, world_size=1)
    allocated = lambda: torch.accelerator.memory_stats()["allocated_bytes.all.current"] // MIB
    given = fill(8)
    work = dist.all_reduce(given, async_op=True)
    del given
    begun = allocated()
    report(waited=work.wait(), begun=begun, ended=allocated(), completed=work.is_completed())
    parts, given = [fill(2)], fill(2).fill_(5)
    work = dist.all_gather(parts, given, async_op=True)
    work.wait()
    del given
    report(held=allocated(), gathered=parts[0].unique().tolist())
    del parts
    given = fill(4).fill_(3)
    work = dist.all_reduce(given, async_op=True)
    future = work.get_future()
    del given
    work.wait()
    report(read=future.value()[0].unique().tolist(), held=allocated())
    dist.destroy_process_group()
    """
    first, second, third = facts(run(tmp_path, story, prelude=SMALL_REPORT))
    assert first == {"waited": True, "begun": 8, "ended": 0, "completed": True}
    assert second == {"held": 2, "gathered": [5]}, "the caller's own tensor stays"
    assert third == {"read": [3], "held": 4}, "somebody still reads it"


def test_an_injected_failure_comes_once(tmp_path):
    story = """
    before = simgpu.allocations()
    kept = [fill(1), fill(1)]
    report(counted=simgpu.allocations() - before)
    simgpu.fail_at(3)
    report(errors=[out_of_memory(1) is not None for _ in range(5)], ooms=torch.accelerator.memory_stats()["num_ooms"])
    refused = []
    for call in (lambda: simgpu.fail_at(0), lambda: simgpu.set_capacity(MIB), lambda: simgpu.enable(MIB)):
        try:
            call()
        except ValueError as error:
            refused.append(str(error))
    simgpu.enable(64 * MIB)
    report(refused=refused, capacity=simgpu.card().capacity_bytes)
    """
    counted, errors, last = facts(run(tmp_path, story, prelude=SMALL_REPORT))
    assert counted == {"counted": 2}
    assert errors == {"errors": [False, False, True, False, False], "ooms": 1}
    assert len(last["refused"]) == 3
    assert last["capacity"] == 64 * MIB


def test_a_tensor_left_on_the_cpu_is_refused_as_on_a_card(tmp_path):
    story = """
    table = torch.nn.Embedding(10, 4).to("simgpu")
    try:
        table(torch.tensor([1, 2]))
        report(error=None)
    except RuntimeError as error:
        report(error=str(error))
    x = torch.arange(10, device="simgpu")
    report(indexed=x[torch.tensor([1, 3])].tolist(), scaled=(x * torch.tensor(2)).tolist()[:3])
    """
    refused, allowed = facts(run(tmp_path, story, prelude=SMALL_REPORT))
    assert refused["error"].startswith(
        "Expected all tensors to be on the same device, but found at least two devices"
    )
    assert allowed == {"indexed": [1, 3], "scaled": [0, 2, 4]}


class TestRunner:
    @pytest.mark.all
    def test_a_script_sees_what_it_would_see_under_python(self, tmp_path):
        (tmp_path / "neighbour.py").write_text("")
        story = """
        import sys, neighbour
        assert vars(sys.modules["__main__"]) is globals()
        print(sys.argv, sys.path[0], __file__)
        raise SystemExit(7)
        """
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(story))
        arguments = [str(script), "--capacity", "x", "-m"]
        plain = self.finished(tmp_path, arguments)
        simulated = self.finished(tmp_path, [*RUNNER, "--capacity", "64MiB", *arguments])
        assert simulated.returncode == plain.returncode == 7
        assert simulated.stdout == plain.stdout

    @pytest.mark.all
    def test_a_module_too(self, tmp_path):
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__main__.py").write_text(
            "import sys\nprint(sys.argv, sys.path[0])\n1 / 0\n"
        )
        plain = self.finished(tmp_path, ["-m", "package", "--flag"])
        simulated = self.finished(
            tmp_path, [*RUNNER, "--capacity", "64MiB", "-m", "package", "--flag"]
        )
        assert simulated.returncode == plain.returncode == 1
        assert simulated.stdout == plain.stdout
        assert simulated.stderr.endswith("ZeroDivisionError: division by zero\n")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--capacity", "much", "x.py"], "a size is a positive number with a unit"),
            (["--capacity", "1MiB", "x.py"], "at least 2 MiB"),
            (["--capacity", "64MiB"], "name a script"),
            (["x.py"], "simgpu needs a capacity, as in --capacity 2GiB"),
            (["--capacity", "64MiB", "no_such_script.py"], "cannot open no_such_script.py"),
        ],
    )
    def test_a_wrong_command_is_refused_in_one_line(self, tmp_path, arguments, words):
        process = self.finished(tmp_path, [*RUNNER, *arguments])
        assert process.returncode == 2
        assert words in process.stderr
        assert len(process.stderr.strip().splitlines()) == 1

    def finished(self, cwd: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return processes.run([sys.executable, *arguments], cwd=cwd, environ=environment())


@pytest.mark.all
def test_where_it_cannot_be_built_it_says_why(tmp_path):
    code = "from trainer_plugins.testing import simgpu; print(simgpu.unavailable_reason())"
    cache = {"TRAINER_PLUGINS_CACHE": str(tmp_path / "cache")}

    def reason(**changes: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment(**cache, **changes), capture_output=True, text=True, check=True
        ).stdout.strip()

    assert (
        reason(PATH=str(tmp_path), CXX="") == "simgpu needs a C++ compiler: install g++ or set CXX"
    )
    said = reason(CXX="false")
    assert "cannot be built for torch" in said
    assert Path(said.rpartition("see ")[2]).read_text().startswith("false ")
