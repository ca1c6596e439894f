"""Token ids to vectors."""

from ..functional import embedding
from ..module import Module
from ..parameter import Parameter


class Embedding(Module):
    """A table of V rows; every rank holds all of it."""

    def __init__(self, num_embeddings, embedding_dim, dtype=None, **unused):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype
        self.weight = Parameter(shape=(num_embeddings, embedding_dim), dtype=dtype)

    def forward(self, x):
        return embedding(x, self.weight.value)
