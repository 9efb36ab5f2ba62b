"""Programs of others that the lab and the tests run."""

import shutil
from pathlib import Path

TOOLS = Path(__file__).parents[2] / ".tools"


def tool(name: str, package: str) -> str:
    """Where a program is: fetched by the Makefile, or installed.

    Args:
        name: of the program.
        package: Debian's.
    """
    fetched = TOOLS / package / "usr" / "bin" / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    assert found, (
        f"{name} is needed and is not here. Fetch it with `dev/fetch-debian.sh {package}`, or install it, "
        f"for example with `apt-get install {package}`."
    )
    return found
