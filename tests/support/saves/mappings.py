"""The mappings of this process's memory, as the kernel shows them."""

from pathlib import Path


def permissions_at(address: int) -> str | None:
    """The permissions of the mapping that an address is in, such as ``rw-p``; None if it is in none.

    The kernel makes one mapping of neighbours that are alike.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions = line.split(" ")[:2]
        start, end = (int(one, 16) for one in addresses.split("-"))
        if start <= address < end:
            return permissions
    return None
