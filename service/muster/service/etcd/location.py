"""The location of a state in etcd, ``etcd://HOST:PORT[,HOST:PORT…]/PREFIX``, and the credentials."""

from dataclasses import dataclass
from pathlib import Path

from muster.service.address import Address

SCHEME = "etcd://"


@dataclass(frozen=True, slots=True)
class Location:
    """A cluster and a prefix of its keys."""

    endpoints: tuple[str, ...]
    """``HOST:PORT`` of the members."""
    prefix: bytes
    """Every key begins so. The last byte is a slash."""

    @classmethod
    def parse(cls, text: str) -> "Location":
        """Read ``etcd://HOST:PORT[,HOST:PORT…]/PREFIX``.

        Raises:
            ValueError: the text does not have this form; the message says what is wrong.
        """
        hosts, _, path = text.removeprefix(SCHEME).partition("/")
        name = path.strip("/")
        if not text.startswith(SCHEME) or not hosts:
            raise ValueError(f'"{text}" is not etcd://HOST:PORT[,HOST:PORT…]/PREFIX')
        if "@" in hosts:
            # Do not repeat the address: it has a password.
            raise ValueError(
                "a user and a password do not belong into the address of etcd: give --etcd-user and "
                "--etcd-password-file"
            )
        if not name or not name.isprintable():
            raise ValueError(
                f'"{text}" names no prefix: say under which keys of etcd the state is, such as '
                f"etcd://{hosts}/muster"
            )
        endpoints = tuple(dict.fromkeys(str(Address.parse(host)) for host in hosts.split(",")))
        return cls(endpoints, f"/{name}/".encode())

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}{self.prefix.decode()}".removesuffix("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials for etcd, and the authorities of its certificates. Each connection reads the files."""

    ca: Path | None = None
    """If given, connections use TLS, and each member must show a certificate of these authorities."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate needs its key: give both --etcd-cert and --etcd-key")
        if self.cert is not None and self.ca is None:
            raise ValueError(
                "--etcd-cert is given without --etcd-ca, the authority of etcd's own certificate"
            )
        if bool(self.user) != (self.password_file is not None):
            raise ValueError(
                "a user of etcd needs a password: give both --etcd-user and --etcd-password-file"
            )
