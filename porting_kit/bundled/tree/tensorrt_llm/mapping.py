"""Which part of the model a rank holds.

Ranks are numbered stage by stage: rank = pp_rank * tp_size + tp_rank. The ranks of one stage share each layer (tensor
parallel); the stages share the list of layers (pipeline parallel).
"""


class Mapping:
    """The place of one rank in a tensor-parallel by pipeline-parallel grid."""

    def __init__(self, world_size=1, rank=0, gpus_per_node=8, tp_size=1, pp_size=1, **unused):
        if world_size != tp_size * pp_size:
            raise ValueError(f"world_size {world_size} is not tp_size {tp_size} * pp_size {pp_size}")
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.tp_size, self.pp_size = tp_size, pp_size
        self.pp_rank, self.tp_rank = divmod(rank, tp_size)
        self.tp_group = [self.pp_rank * tp_size + peer for peer in range(tp_size)]
        self.pp_group = [stage * tp_size + self.tp_rank for stage in range(pp_size)]

    @classmethod
    def from_dict(cls, fields):
        """The mapping that a checkpoint's config.json states; its rank is given later."""
        return cls(**fields)

    def to_dict(self):
        """The fields of config.json, and the rank."""
        names = ("world_size", "rank", "gpus_per_node", "tp_size", "pp_size")
        return {name: getattr(self, name) for name in names}

    def has_tp(self):
        return self.tp_size > 1

    def has_pp(self):
        return self.pp_size > 1

    def is_first_pp_rank(self):
        return self.pp_rank == 0

    def is_last_pp_rank(self):
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self):
        """The rank of the same tensor-parallel slice one stage earlier, the last stage before the first."""
        return (self.rank - self.tp_size) % self.world_size

    def next_pp_rank(self):
        """The rank of the same tensor-parallel slice one stage later."""
        return (self.rank + self.tp_size) % self.world_size

    def pp_layers(self, num_layers):
        """The numbers of the layers of this stage."""
        per_stage = num_layers // self.pp_size
        return list(range(self.pp_rank * per_stage, (self.pp_rank + 1) * per_stage))
