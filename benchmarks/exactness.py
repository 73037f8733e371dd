"""How exact: flash attention against the fp64 reference, and every rank layout against one process.

Writes exactness.json.

python benchmarks/exactness.py # about a minute; the same checks with their limits are tests
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import pod  # noqa: F401  (registers the implementations)
from pod.files import write_json
from pod.measure.machine import environment
from pod.modeling.model.attend import Segments, SharedQK, Tokens, Visibility, attend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "exactness.json"
NAMES = ("q", "k", "v", "q_lead", "k_lead")
SHAPES = ((13, 4, 8), (63, 4, 8), (200, 0, 1), (257, 16, 100), (500, 3, 197), (64, 4, 400), (1500, 16, 240))


def attention_errors() -> dict[str, float]:
    """Largest relative error in fp32 over ragged shapes, G = 1, 3, 4, with and without documents."""
    worst = dict.fromkeys(("out", *NAMES), 0.0)
    for n, *windows in SHAPES:
        for groups in (1, 3, 4):
            for packed in (False, True):
                generator = torch.Generator().manual_seed(n + groups)
                heads = (2 * groups, 2, 2, 2 * groups, 2)
                inputs = [torch.randn(2, h, n, 16, generator=generator) for h in heads]
                doc_ids = (torch.arange(n) * 3 // n).expand(2, -1) if packed else None
                ours = _run("flash", inputs, windows, doc_ids)
                truth = _run("reference", [x.double() for x in inputs], windows, doc_ids)
                for name, a, b in zip(worst, ours, truth, strict=True):
                    if b.norm() > 1e-9:
                        worst[name] = max(worst[name], float(((a - b).norm() / b.norm()).detach()))
    return worst


def _run(backend, inputs, windows, doc_ids) -> list[torch.Tensor]:
    q, k, v, q_lead, k_lead = leaves = [x.clone().requires_grad_() for x in inputs]
    segments = None if doc_ids is None else Segments.of_documents(doc_ids, q.shape[0])
    lead, see = SharedQK(q_lead, k_lead), Visibility(*windows)
    out, _ = attend(q, Tokens(k, v), lead, see, segments, backend=backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def parallel_errors() -> dict[str, dict[str, float]]:
    """Loss and worst raw gradient of each rank layout, relative to plain PyTorch in one process."""
    worker = ROOT / "tests" / "training" / "worker_parallel.py"
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(worker), folder], env=settings, check=True, capture_output=True)
        results = {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
    return {
        name: {"loss": result["loss"], "gradient": result["gradient"]}
        for name, result in results.items()
        if "gradient" in result
    }


if __name__ == "__main__":
    content = {
        "environment": environment(),
        "attention_fp32_relative": attention_errors(),
        "parallel_fp32_relative": parallel_errors(),
    }
    write_json(RESULTS, content)
    print(json.dumps(content, indent=1))
