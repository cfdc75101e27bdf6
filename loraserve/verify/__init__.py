"""`verify_adapter`: serve an adapter with the real engine in this process and hold every logit against PEFT's.

The engine answers greedily: alone, all prompts together beside the base and a second copy of the adapter, after the
device dropped the adapter for others, and after it was unloaded and loaded again. PEFT then computes the same sequences
in float32, and each row of logits that led to a token, prompt and answer alike, is compared. Where that is not nearly
equal PEFT computes in float64 too: what its own rounding in float32 comes to is allowed twice over.
"""

from loraserve.verify.compare import TOLERANCES, Check, Divergence, Scenario, Served
from loraserve.verify.options import VerifyOptions
from loraserve.verify.reference import ReferenceUnavailable
from loraserve.verify.run import Verdict, verify_adapter

__all__ = [
    "TOLERANCES",
    "Check",
    "Divergence",
    "ReferenceUnavailable",
    "Scenario",
    "Served",
    "Verdict",
    "VerifyOptions",
    "verify_adapter",
]
