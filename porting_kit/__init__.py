"""Port a Hugging Face decoder model and its Medusa heads to TensorRT-LLM, and prove that the result is right.

Letters for shapes, used in every docstring and shape comment of the package:

====  =====================================================================
B     batch: requests in one call
S     sequence: tokens of one prompt
T     packed tokens: the sum of S (or of N) over the requests of one call
E     hidden size
D     head size
H     query heads
K     key/value heads
V     vocabulary
Vp    vocabulary padded to a multiple of the tensor-parallel size
L     decoder layers
M     Medusa heads
R     residual layers of one Medusa head
N     tree nodes, the root included
W     32-bit words of one packed mask row, ceil(N / 32)
P     tree paths, one per leaf
====  =====================================================================
"""

__version__ = "0.1.0"
