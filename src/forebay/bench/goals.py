"""The bound each figure should keep, and the machine it was set for.

Goals of the GPU's figures were set for one H200 behind PCIe 5 x16. Those that are ratios to a plain
copy or an idle GPU of the same run mean something elsewhere too; the others may not.
"""

from __future__ import annotations

from forebay.measure.report import Goal

GOALS_GPU = "H200"
LEADS_MS = (0, 3, 6, 12, 25)
"""How long before it is needed a load is started."""
AXES = ("gb_per_s", "foreign_p99_us", "decode_ms_per_gb")
"""On which the mover and its rivals are compared."""

TRANSFER_GOALS = {
    "h2d_2mib_8": Goal(at_least=0.96),
    "h2d_2mib_4": Goal(at_least=0.93),
    "both_ways": Goal(at_least=0.92),
    "frag_64k": Goal(at_least=0.92),
    "frag_64k_5mib": Goal(at_least=0.92),
    "frag_32k": Goal(at_least=0.82),
    "frag_32k_5mib": Goal(at_least=0.82),
    "foreign_p99_8_us": Goal(at_most=380),
    "foreign_p99_4_us": Goal(at_most=230),
    "foreign_p99_both_h2d_us": Goal(at_most=380),
    "foreign_p99_both_d2h_us": Goal(at_most=380),
    "urgent_64mib_ms": Goal(at_most=2),
    "submit_us_2048_tokens": Goal(at_most=20),
    "arbiter_cores": Goal(at_most=1),
    "arbiter_cores_idle": Goal(at_most=0.01),
    "rivals_that_dominate_64k": Goal(at_most=0),
    "rivals_that_dominate_2m": Goal(at_most=0),
    "loop_is_dominated_64k": Goal(at_least=1),
    "loop_is_dominated_2m": Goal(at_least=1),
    # Without a GPU: ratios, and processor time.
    "arbiter_vs_memcpy": Goal(at_least=0.9),
    "urgent_wait_windows": Goal(at_most=3),
    "submit_us_2048_blocks": Goal(at_most=100),
}
OVERLAP_GOALS = {
    "decode_inflation_load": Goal(at_most=1.08),
    "decode_inflation_both": Goal(at_most=1.09),
    "weights_inflation_load": Goal(at_most=1.08),
    "weights_inflation_both": Goal(at_most=1.09),
    **{
        f"link_beside_{kind}_{ways}": Goal(at_least=0.9)
        for kind in ("decode", "weights")
        for ways in ("load", "both")
    },
    "launch_delay_2mib_us": Goal(at_most=20),
    "launch_delay_64kib_us": Goal(at_most=60),
    **{f"textbook_excess_{lead}_ms": Goal(at_most=0.4) for lead in LEADS_MS},
    "textbook_itl_p99": Goal(at_most=1.1),
    "pin_rate": Goal(at_least=1.5),
    "serve_while_pinning_s": Goal(at_most=5),
}


def about_goals(gpus: list[str]) -> str:
    """A line for under the table, on a machine with these GPUs; "" where goals are at home."""
    if not gpus or GOALS_GPU in gpus[0]:
        return ""
    return f"goals of GPU figures were set for an {GOALS_GPU} behind PCIe 5 x16, not for {gpus[0]}"
