"""What users of torch get by ``import muster.worker``, without a further line.

It is imported with the package where torch is loaded, and else at the end of torch's own import.
"""

from torch.distributed import DistStoreError

from muster.worker.errors import MusterError

# The SDK may have been imported first. Its errors are caught as if torch had been.
if not issubclass(MusterError, DistStoreError):
    MusterError.__bases__ = (DistStoreError,)

import muster.worker.barriers  # noqa: F401 - registers barrier type grpc
