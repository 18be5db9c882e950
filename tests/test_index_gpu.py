"""First calls of new processes on a GPU: the second finds in the index, and in Triton's cache, what the first left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FRESH = """
import ctypes, hashlib, importlib.abc, json, sys, torch

asked = []

class Watch(importlib.abc.MetaPathFinder):
    '''Finds nothing; notes which of our modules asks for one of these.'''
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        who = "" if frame is None else frame.f_globals.get("__name__", "")
        if name in ("jinja2", "yaml", "sqlite3") and who.startswith("tunegen"):
            asked.append([who, name])

def bits(tensor):
    here = tensor.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(here.data_ptr(), here.nbytes)).hexdigest()

sys.meta_path.insert(0, Watch())
generator = torch.Generator().manual_seed(0)
x, dy = (torch.randn(300, 4096, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
w = torch.randn(4096, generator=generator).to("cuda", torch.bfloat16)
from tunegen import dispatch, rms_norm
plain = rms_norm(x, w, policy="deterministic")
x.requires_grad_(), w.requires_grad_()
y = rms_norm(x, w, policy="deterministic")
y.backward(dy)
from triton.runtime import cache
ours = [name for name in ("entries", "lookup", "space") if f"tunegen.{name}" in sys.modules]
digests = cache.triton_key.cache_info().currsize
same = [*map(bits, (plain, y, x.grad, w.grad))]
found = {"bits": same, "answers": dispatch.answers(), "asked": asked, "ours": ours, "digests": digests}
print(json.dumps(found))
"""


def test_the_second_process_reads_neither_space_nor_database_nor_templates(tmp_path):
    places = {"TUNEGEN_BUILD": "build", "TRITON_CACHE_DIR": "triton", "TUNEGEN_DB": "tune.db"}
    environment = {**os.environ, **{name: str(tmp_path / place) for name, place in places.items()}}

    def fresh():
        done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, again = fresh(), fresh()
    assert "torch" not in first["answers"].values()
    assert len(first["answers"]) == 2
    assert (first["ours"], first["digests"]) == (["entries", "lookup", "space"], 1)
    assert (again["ours"], again["digests"], again["asked"]) == ([], 0, [])
    assert again["answers"] == first["answers"]
    assert again["bits"] == first["bits"]
    for path in (tmp_path / "build").glob("index_*.json"):
        path.unlink()
    third = fresh()
    assert third["ours"] == first["ours"]
    assert third["bits"] == first["bits"]
