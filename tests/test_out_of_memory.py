"""A snapshot of CUDA's allocator is added up by the program's lines; without a GPU nothing is added up."""

import linecache

from labs.gpu import out_of_memory as lab
from labs.kit.launch import launch


def block(size, state, *lines):
    frames = [{"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"}]
    return {"size": size, "state": state, "frames": frames + [{"filename": lab.__file__, "line": n} for n in lines]}


def test_blocks_are_added_up_by_the_innermost_line_of_the_program():
    text = linecache.getlines(lab.__file__)
    forward = next(n for n, line in enumerate(text, 1) if "loss = model(x)" in line)
    caller = next(n for n, line in enumerate(text, 1) if line.strip().startswith("train(model, rows"))
    blocks = [block(512, "active_allocated", forward, caller), block(1024, "active_allocated", forward, caller)]
    blocks += [block(64, "inactive", forward), block(2048, "active_allocated")]
    found = lab.held_by_line({"segments": [{"blocks": blocks[:1]}, {"blocks": blocks[1:]}]})
    assert found == {"loss = model(x).square().mean()": 1536, "backward": 2048}


def test_a_cpu_says_that_nothing_was_asked_for(tmp_path):
    run = launch("labs.gpu.out_of_memory", 1, device="cpu", folder=tmp_path)
    assert "said on a CPU" in run.one("failed_batch").case["message"] and not run.where("held_bytes")
    assert "said on a CPU" in (tmp_path / "message.txt").read_text()
