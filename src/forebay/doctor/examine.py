"""All findings about a machine, for what is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forebay.doctor import device, memory, model, processors, serving, software
from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.machine.sizes import show_size


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`host_pool_bytes` is the largest host pool that fits now; None where that is not known."""

    findings: tuple[Finding, ...]
    host_pool_bytes: int | None
    host_pool_tokens: int | None

    @property
    def fails(self) -> bool:
        """Whether anything will not work."""
        return any(finding.level is Level.FAIL for finding in self.findings)

    @property
    def summary(self) -> str:
        """One line."""
        if self.host_pool_bytes is None:
            text = "host pool: unknown"
        else:
            text = f"host pool up to {show_size(self.host_pool_bytes)} on this machine"
        if self.host_pool_tokens is not None:
            text += f", {self.host_pool_tokens:,} tokens of this model"
        for level, said in ((Level.FAIL, "will fail"), (Level.WARN, "will be worse than it could")):
            count = sum(finding.level is level for finding in self.findings)
            if count:
                text += f"; {count} thing{'s' * (count > 1)} {said}"
        return text


def examine(machine: Machine, wanted: Wanted) -> Diagnosis:
    """Look at everything. Never raises."""
    on_gpu = device.choose(machine, wanted).gpu is not None
    weights, about_model = model.look_at_model(wanted, element_bytes=2 if on_gpu else 4)
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("memory", lambda: memory.check_memory(machine, wanted, weights)),
        ("locked memory", lambda: memory.check_locked(machine, wanted)),
        ("swap", lambda: memory.check_swap(machine)),
        ("/dev/shm", lambda: memory.check_shared(machine)),
        ("huge pages", lambda: memory.check_huge_pages(machine)),
        ("processors", lambda: processors.check_cores(machine)),
        ("NUMA", lambda: processors.check_nodes(machine, wanted)),
        ("clock", lambda: processors.check_clock(machine)),
        ("CUDA driver", lambda: software.check_driver(machine)),
        ("PyTorch", lambda: software.check_torch(machine)),
        ("device", lambda: device.check_device(machine, wanted)),
        ("GPU memory", lambda: device.check_room(machine, wanted, weights)),
        ("packages", software.check_packages),
        ("extension", software.check_extension),
        ("vLLM", software.check_vllm),
        ("port", lambda: serving.check_port(machine, wanted)),
        ("open files", lambda: serving.check_files(machine, wanted)),
        ("model", lambda: about_model),
        ("cache folder", lambda: model.check_cache_folder(machine, wanted)),
    ]
    findings = [finding for subject, check in checks for finding in _made(subject, check)]
    findings += [
        Finding("unread", Level.NOTE, what, "what it would have said is not known")
        for what in dict.fromkeys(machine.tree.unread)
    ]
    room = memory.host_pool_room(machine, wanted, weights)
    tokens = None
    if room is not None and weights.geometry is not None:
        tokens = room // weights.geometry.token_bytes
    return Diagnosis(tuple(findings), room, tokens)


def _made(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The check's findings; what it stumbles over is one."""
    try:
        return list(check())
    except Exception as error:
        return [Finding(subject, Level.NOTE, f"could not be looked at: {error!r}")]
