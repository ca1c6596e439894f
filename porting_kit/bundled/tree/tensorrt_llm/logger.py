"""The log of this package."""

import logging

logger = logging.getLogger("tensorrt_llm")
