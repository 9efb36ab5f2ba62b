"""Uploads in parts that were never completed: S3 keeps the parts, and bills them, until somebody aborts them.

Other stores forget them by themselves, after days.
"""

from typing import Any, NamedTuple

from fsspec import AbstractFileSystem


class Upload(NamedTuple):
    """One that has begun."""

    path: str
    """Of the object that it is to become."""
    upload_id: str


def unfinished(fs: AbstractFileSystem, path: str) -> list[Upload]:
    """Those below a path.

    Raises:
        OSError: the store does not tell.
    """
    if not hasattr(fs, "call_s3"):
        return []
    bucket, prefix, _ = fs.split_path(f"{path}/")
    found: list[Upload] = []
    page: dict[str, Any] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        # Not every server that speaks S3 heeds the prefix.
        found += [
            Upload(f"{bucket}/{one['Key']}", one["UploadId"])
            for one in answer.get("Uploads", ())
            if one["Key"].startswith(prefix)
        ]
        if not answer.get("IsTruncated"):
            return found
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort(fs: AbstractFileSystem, path: str) -> None:
    """End those below a path.

    Raises:
        OSError: the store does not.
    """
    for upload in unfinished(fs, path):
        bucket, key, _ = fs.split_path(upload.path)
        try:
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
        except FileNotFoundError:
            continue  # Another has.
