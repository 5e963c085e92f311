"""Published numbers are those of their sources, typed a second time; models that are only counted have their size."""

import torch

from labs.chapters.nb03 import figures_scaling
from labs.parts.models.large_models import resnet_50, vgg_16
from labs.parts.sources.published import rtx_3090_images

# server-gear.com/blog/post/rtx3090-x8-exhaustive-tf-cnn-benchmarks: images/s on 1, 2, 4 and 8 cards
RTX_3090 = """
ResNet-50   64  1026.83 1828.21 2798.55 4039.44
ResNet-50   128 1126.66 2103.69 3596.61 6005.06
ResNet-50   256 1181.90 2283.06 4266.43 7362.66
ResNet-50   512 1205.02 2371.21 4635.48 8756.00
Inception-3 64  709.40  1304.37 2247.00 3549.19
Inception-3 128 764.99  1382.01 2692.60 4865.46
Inception-3 256 806.46  1573.15 2979.08 5598.28
VGG-16      64  419.83  589.37  703.38  634.67
VGG-16      128 439.85  756.71  949.62  1093.66
VGG-16      256 455.41  821.34  1303.34 1695.73
VGG-16      512 440.25  838.75  1356.53 2171.86
"""


def test_the_table_of_eight_rtx_3090():
    rows = [line.split() for line in RTX_3090.strip().splitlines()]
    typed = {(row[0], int(row[1]), n): float(v) for row in rows for n, v in zip((1, 2, 4, 8), row[2:], strict=True)}
    found = rtx_3090_images()
    assert {(r.case["model"], r.case["batch"], r.case["ranks"]): r.value for r in found} == typed
    assert {(r.kind, r.unit) for r in found} == {("published", "images/s")}


def test_what_is_said_of_it():
    table, text = figures_scaling.published_table(), figures_scaling.published_text()
    assert table.shape == (3, 4) and table.loc["VGG-16", 64] == "1.51 x"
    assert table.loc["Inception-3", 512] == "not published"
    assert "1 of 11 cases" in text and "420, 589, 703, 635" in text
    assert "138.4 million" in text and "74%" in text and "25.6 million" in text


def test_models_that_are_counted_have_the_size_of_their_papers():
    """138 million: Simonyan and Zisserman 2014, table 2, D. To the last one: the sizes that torchvision documents."""
    assert sum(p.numel() for p in vgg_16().parameters()) == 138_357_544
    assert sum(p.numel() for p in resnet_50().parameters()) == 25_557_032
    assert vgg_16()(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
