"""A published NCCL log and its source."""

from __future__ import annotations

SOURCE = "github.com/NVIDIA/nccl, issue 1453: all_reduce_perf on three machines of 8 H100 each, lines of rank 0"
LOG = """\
h100clust-worker-1:497888:497958 [0] NCCL INFO Channel 05/16 :    0   7   6  13  12  11  10   9   8  15  14  21  20  19  18  17  16  23  22   5
h100clust-worker-1:497888:497958 [0] NCCL INFO Channel 08/16 :    0   7   6   5   4   3   2   1   8  15  14  13  12  11  10   9  16  23  22  21
h100clust-worker-1:497888:498087 [0] NCCL INFO Channel 08/0 : 16[0] -> 0[0] [receive] via NET/IBext_v8/7/GDRDMA
h100clust-worker-1:497888:498087 [0] NCCL INFO Channel 08/0 : 0[0] -> 8[0] [send] via NET/IBext_v8/7/GDRDMA
h100clust-worker-1:497888:498087 [0] NCCL INFO Channel 08/0 : 8[0] -> 0[0] [receive] via NET/IBext_v8/7/GDRDMA
h100clust-worker-1:497888:498087 [0] NCCL INFO Channel 08/0 : 0[0] -> 16[0] [send] via NET/IBext_v8/7/GDRDMA
h100clust-worker-1:497888:498087 [0] NCCL INFO Connected all trees
h100clust-worker-1:497888:497888 [0] NCCL INFO 4 Bytes -> Algo 0 proto 0 time 25.200462
h100clust-worker-1:497888:497888 [0] NCCL INFO 65536 Bytes -> Algo 0 proto 0 time 37.798233
h100clust-worker-1:497888:497888 [0] NCCL INFO 131072 Bytes -> Algo 0 proto 1 time 51.603912
h100clust-worker-1:497888:497888 [0] NCCL INFO 262144 Bytes -> Algo 0 proto 1 time 54.707825
"""  # noqa: E501
