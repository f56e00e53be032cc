"""Pages as the tests read them, and runs, plans and snapshots that are drawn."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.explain.recorded import RecordedCard
from tests.explain.test_snapshot import train
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.explain.snapshot import explain_snapshot
from trainer_plugins.planner.plan import MemoryPlan, MomentPeak, Proposal
from trainer_plugins.report.html import page as page_module
from trainer_plugins.report.html.page import Page
from trainer_plugins.report.html.snapshot_page import snapshot_page
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.units import GIB, MIB

HTML = Path(page_module.__file__).parent
VOID = {"meta", "br", "hr", "wbr", "input"}


class Read(HTMLParser):
    """What is on a page, and whether each element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: set[int] = set()
        self.words = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "data":
            self.figures.add(int(given["value"]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
            if self.tags[-1][1].get("type") == "application/json":
                self.data = json.loads(data)
            return
        self.words += data
        if self._open and self._open[-1] == "title":
            self.titles.append(data)

    def attributes(self, name: str) -> list[str]:
        return [given[name] or "" for _, given in self.tags if name in given]


def loads_nothing(text: str) -> bool:
    """Whether a page loads nothing, leads nowhere else, and runs its own script only."""
    page = Read(text)
    here = all(each.startswith("#") for each in page.attributes("href"))
    tags = {tag for tag, _ in page.tags}
    active = {"link", "img", "iframe", "object", "embed", "form", "base", "foreignobject"}
    names = {name for _, given in page.tags for name in given}
    _, script = page.scripts  # the first is data
    ours = [(HTML / name).read_text(encoding="utf-8") for name in ("page.js", "snapshot.js")]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        here
        and not tags & active
        and not names & {"src", "srcset", "action", "data", "xlink:href"}
        and not any(name.startswith("on") for name in names)
        and "@import" not in text
        and "url(" not in text
        and "default-src 'none'" in text
        and re.findall('script-src ([^;"]*)', text) == [f"'sha256-{allowed}'"]
        and script in (ours[0], "".join(ours))
        and not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(", script
        )
        and not re.search(r"fetch\(|XMLHttp|WebSocket|import\(|sendBeacon", script)
    )


def highest(page: Read, colour: str, which: int = 0) -> float:
    """The highest point of an area or a line of a chart, as a number."""
    chart = [*page.data["charts"].values()][which]
    (values,) = (
        each["values"] for each in (*chart["areas"], *chart["lines"]) if each["colour"] == colour
    )
    return max(value for value in values if value is not None)


class Keeps(TrainerCallback):
    """Keeps some MiB of each step, as a list of losses with their graphs does."""

    def __init__(self, mib: float) -> None:
        self.mib = mib
        self.kept: list[object] = []

    def on_step_end(self, args, state, control, **kwargs):
        import torch

        self.kept.append(torch.zeros(int(self.mib * MIB), dtype=torch.uint8, device=args.device))


def plan_of(points: Sequence[tuple[str, float]], gpu_gib: float = 24) -> MemoryPlan:
    """A plan by hand: moments with their allocated GiB, of which the last peak is the peak."""
    timeline = tuple((moment, int(gib * GIB), int((gib + 1) * GIB)) for moment, gib in points)
    peaks: dict = {}
    for moment, now, held in timeline:
        before = peaks.get(moment, MomentPeak(allocated_bytes=0, reserved_bytes=0))
        peaks[moment] = MomentPeak(
            allocated_bytes=max(now, before.allocated_bytes),
            reserved_bytes=max(held, before.reserved_bytes),
        )
    moment, peak, _ = max(timeline, key=lambda point: point[1])
    reserved = max(held for *_, held in timeline)
    short = reserved + GIB // 2 > gpu_gib * GIB
    return MemoryPlan(
        allocated_peak_bytes=peak, reserved_peak_bytes=reserved, nvidia_smi_peak_bytes=reserved + GIB // 2,
        host_ram_bytes_per_node=GIB, capacity_bytes=int(gpu_gib * GIB), fits=not short, moment=moment,  # type: ignore[arg-type]
        breakdown={"activations": peak // 2, "weights": peak - peak // 2},
        moments=peaks, timeline=timeline, context_bytes=GIB // 2, gpu="a card",  # type: ignore[arg-type]
        failed_request_bytes=GIB if short else None, failed_request="aten::mm" if short else None,
        planned={"model": "LlamaForCausalLM", "command": "trainer-plugins plan --model config.json"},
        proposals=(Proposal(
            changes=("4 rows x 2",), price="the same training in smaller steps",
            flags="--per_device_train_batch_size 4 --gradient_accumulation_steps 2", micro_batch=4,
            accumulation_steps=2, sequence_length=1024, reserved_peak_bytes=GIB, nvidia_smi_peak_bytes=2 * GIB,
            margin_bytes=GIB // 4, host_ram_bytes_per_node=GIB,
        ),) if short else (),
    )  # fmt: skip


STEP = [("forward", 2), ("forward", 4), ("backward", 6), ("backward", 3), ("optimizer step", 3)]
MOMENTS = [("load", 1), *STEP, *STEP, *STEP, ("evaluation", 2), ("save", 2)]


def draw_card(card: RecordedCard, folder: Path) -> tuple[SnapshotCase, Page]:
    case, answer = explain_snapshot(card.dump(folder / "snapshot.pickle"))
    return case, snapshot_page(answer, case)


def draw_oom(folder: Path) -> tuple[SnapshotCase, Page]:
    """Thirty steps on the allocator's model that keep an activation each, until the card is full."""
    card = RecordedCard(500 * MIB)
    with pytest.raises(AllocatorFull):
        train(card, 30, keeps=True)
    return draw_card(card, folder)
