"""One rank of an alignment, as `porting_kit.steps.ranks.launch_ranks` starts it under torchrun."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from porting_kit.errors import PortingKitError
from porting_kit.steps.align import align_session
from porting_kit.steps.alignment_session import AlignmentSession, current_rank
from porting_kit.steps.ranks import ERROR_FILE, RESULT_FILE, RUN_FILE, describe_error, join_ranks, wait_for_ranks


def main(folder: Path) -> None:
    """Run the alignment; the first rank leaves the result in `folder`, any rank its error."""
    run = pickle.loads((folder / RUN_FILE).read_bytes())
    try:
        join_ranks(run)
        result = align_session(AlignmentSession(run))
        if current_rank() == 0:
            (folder / RESULT_FILE).write_bytes(pickle.dumps(result))
        wait_for_ranks()  # a rank that leaves while another still sends ends it
    except PortingKitError as error:
        (folder / ERROR_FILE.format(rank=current_rank())).write_bytes(pickle.dumps(describe_error(error)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
