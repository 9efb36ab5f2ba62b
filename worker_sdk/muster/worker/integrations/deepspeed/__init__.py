"""DeepSpeed's engine, with checkpoints that are committed by all ranks or by none.

Tried with DeepSpeed 0.19.8. Where the engine is another, the import fails and says so.
"""

from muster.worker.integrations.deepspeed.attach import adopt, commit_together

__all__ = ["adopt", "commit_together"]
