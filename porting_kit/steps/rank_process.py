"""One rank of an alignment, as `porting_kit.steps.ranks.launch_ranks` starts it under torchrun."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from porting_kit.errors import PortingKitError
from porting_kit.steps.align import align_session
from porting_kit.steps.alignment_session import AlignmentSession, current_rank
from porting_kit.steps.ranks import RESULT_FILE, RUN_FILE, describe_error, join_ranks


def main(folder: Path) -> None:
    """Run the alignment; the first rank leaves the result, or the error, in `folder`."""
    run = pickle.loads((folder / RUN_FILE).read_bytes())
    try:
        join_ranks(run)
        found = ("result", align_session(AlignmentSession(run)))
    except PortingKitError as error:
        found = ("error", describe_error(error))
    if current_rank() == 0:
        (folder / RESULT_FILE).write_bytes(pickle.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
