"""Faults a test can order, by `POST /simulator/faults` or in process. Real vLLM has no such thing."""

import msgspec


class Faults(msgspec.Struct, kw_only=True):
    """The faults in force. Each stays until changed; `fail_loads` and `drop_kv_batches` count down.

    fail_loads       the next so many loads fail in the engine, with `fail_load_status` (their id is used up)
    delay_load_s     every load holds the engine up this much longer
    frozen           the engine core stands still: /health is 200, whatever needs the engine hangs
    serve_base       requests under adapter names are answered by the base, from the next admission on; slots are right
    stale            a load puts the adapter that was read before it into the new name's slot
    wrong_alpha      a load scales by twice alpha
    corrupt_slot     a load leaves one tensor of the slot wrong; too little to change an answer
    drop_on_load     a load is answered and listed, and the workers hold nothing
    drop_kv_batches  the next so many KV-event batches are not sent; the replay still has them
    die              the engine core dies now, and the process some time after it
    """

    fail_loads: int = 0
    fail_load_status: int = 500
    delay_load_s: float = 0.0
    frozen: bool = False
    serve_base: bool = False
    stale: bool = False
    wrong_alpha: bool = False
    corrupt_slot: bool = False
    drop_on_load: bool = False
    drop_kv_batches: int = 0
    die: bool = False
