"""Tables that people paste beside an error: nvidia-smi's list of processes, the kernel's of a kill."""

from tests.explain.stated import explained

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 23.64 GiB of which 512.00 MiB is free.\n"
)


def smi(*rows: tuple[int, int, str, int]) -> str:
    """Lay out processes as nvidia-smi does: card, pid, name, MiB."""
    return "".join(
        f"|    {card}   N/A  N/A {pid:9}      C   {name:<38} {mib:>6}MiB |\n"
        for card, pid, name, mib in rows
    )


def test_other_programs_in_the_table_of_nvidia_smi_are_named_with_their_sum() -> None:
    table = smi((0, 1234, "python train.py", 11264), (0, 5678, "/usr/bin/ollama", 6144))
    answer = explained(FULL + table)
    (first, *_) = answer.causes
    assert (first.code, first.grade) == ("foreign", "likely")
    assert "2 processes on card 0 with 17.00 GiB together, 6.00 GiB of them" in first.evidence[0]
    assert "/usr/bin/ollama (pid 5678) has 6.00 GiB" in first.evidence[1]
    assert "5678" in answer.remedies[0].effect
    assert "1234" not in answer.remedies[0].effect


def test_a_table_tells_dataparallel_from_ranks_on_one_card() -> None:
    def codes(before: str, *rows: tuple[int, int, int]) -> list[str]:
        table = smi(*((card, pid, "python", mib) for card, pid, mib in rows))
        return [cause.code for cause in explained(before + table).causes]

    ranks = (5, 11, 2885), (5, 12, 1387), (5, 13, 1387), (6, 12, 2889), (7, 13, 2889)
    assert codes("", (0, 11, 10505), (1, 11, 4991), (4, 11, 4925)) == ["data-parallel"]
    assert codes("", *ranks) == ["ddp-gpu0"]
    assert codes(FULL, *ranks)[0] == "ddp-gpu0"
    assert codes("", (0, 11, 9000), (1, 12, 9000)) == []


def test_a_second_python_on_the_card_is_another_run_unless_ranks_are_shown() -> None:
    table = smi((0, 10, "python", 12000), (0, 11, "/opt/conda/bin/python", 9000))
    assert explained(FULL + table).causes[0].code == "foreign"
    assert (
        explained("torchrun --nproc_per_node 2 t.py\n" + FULL + table).causes[0].code != "foreign"
    )


def test_a_desktop_or_a_process_of_another_card_is_no_cause() -> None:
    table = smi(
        (0, 10, "python", 20000), (0, 11, "/usr/lib/xorg/Xorg", 300), (1, 12, "vllm", 20000)
    )
    assert explained(FULL + table).causes[0].code != "foreign"


def test_the_pages_of_the_kernels_table_are_summed_by_name() -> None:
    text = (
        "[9.1] python invoked oom-killer: gfp_mask=0x140cca, order=0, oom_score_adj=0\n"
        "[9.2] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name\n"
        "[9.3] [   2201]  1000  2201 25165824 14680064 130023424        0             0 python\n"
        "[9.4] [   2290]  1000  2290  1048576   524288   4194304        0             0 python\n"
        "[9.5] [    900]     0   900     1024      512      4096        0             0 sshd\n"
        "[9.6] Out of memory: Killed process 2201 (python) total-vm:100663296kB,"
        " anon-rss:58720256kB, file-rss:0kB, shmem-rss:0kB\n"
    )
    answer = explained(text)
    assert answer.causes[0].code == "host-kill"
    said = "killed python (pid 2201), which held 56.00 GiB; 2 processes of this name held 58.00 GiB"
    assert said in answer.causes[0].evidence[1]
    assert not any("dmesg" in each.do for each in answer.remedies), "the text has it already"
