"""The daemon's state and its transactions: every RPC is one method of `KvCache`."""
