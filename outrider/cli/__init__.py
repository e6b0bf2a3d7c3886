"""The `outrider` command. Errors of ours say what is wrong; gRPC's own log of the same would only hide them."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is first imported
