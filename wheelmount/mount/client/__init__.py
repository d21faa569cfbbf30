"""The client's side of a mount: its calls, its delivery, and its agents on hosts."""
