"""Multipart uploads that were never completed: S3 keeps and bills the parts until the upload is aborted.

Other stores delete the parts by themselves after days.
"""

from typing import Any, NamedTuple

from fsspec import AbstractFileSystem


class Upload(NamedTuple):
    """An upload that has begun."""

    path: str
    """The path of the object that it would create."""
    upload_id: str


def unfinished(fs: AbstractFileSystem, path: str) -> list[Upload]:
    """Return the uncompleted uploads below a path.

    Raises:
        OSError: the store cannot list them.
    """
    if not hasattr(fs, "call_s3"):
        return []
    bucket, prefix, _ = fs.split_path(f"{path}/")
    found: list[Upload] = []
    page: dict[str, Any] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        # Some S3 servers ignore the prefix.
        found += [
            Upload(f"{bucket}/{one['Key']}", one["UploadId"])
            for one in answer.get("Uploads", ())
            if one["Key"].startswith(prefix)
        ]
        if not answer.get("IsTruncated"):
            return found
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort(fs: AbstractFileSystem, path: str) -> None:
    """Abort the uncompleted uploads below a path.

    Raises:
        OSError: the store cannot abort one.
    """
    for upload in unfinished(fs, path):
        bucket, key, _ = fs.split_path(upload.path)
        try:
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
        except FileNotFoundError:
            continue  # Another process has aborted it.
