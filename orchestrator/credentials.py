"""How requests to object storages are signed: by the credentials that are found, or, for a public bucket, not
at all.
"""

import http.client
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from obstore.auth.boto3 import Boto3CredentialProvider

from orchestrator.errors import UsageError

# Scheme -> variables that say that a bucket is public.
PUBLIC: Mapping[str, tuple[str, ...]] = {
    "s3": ("AWS_NO_SIGN_REQUEST", "AWS_SKIP_SIGNATURE"),
    "gs": ("GOOGLE_SKIP_SIGNATURE",),
    "az": ("AZURE_SKIP_SIGNATURE",),
}
# Scheme -> what gives credentials.
GIVEN: Mapping[str, str] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
GOOGLE_LOGIN = "~/.config/gcloud/application_default_credentials.json"
METADATA_HOSTS = ("metadata.google.internal", "169.254.169.254")  # they answer on Google's machines


def signing(scheme: str, bucket: str) -> dict[str, Any]:
    """Returns how obstore signs its requests.

    Raises:
        UsageError: if there are no credentials. Those of Azure are looked for at the first request.
    """
    if is_public(scheme):
        return {"skip_signature": True}
    if scheme == "s3":
        try:
            # boto3 also knows profiles and single sign-on.
            return {"credential_provider": Boto3CredentialProvider()}
        except ValueError:
            raise UsageError(f"s3://{bucket}: no credentials: {how_to_sign('s3')}") from None
    if scheme == "gs" and not _has_google_credentials():
        raise UsageError(f"gs://{bucket}: no credentials: {how_to_sign('gs')}")
    return {}


def is_public(scheme: str) -> bool:
    """Returns whether the user says that the buckets are public."""
    values = (os.environ.get(name, "").strip().lower() for name in PUBLIC[scheme])
    return any(value in ("1", "true", "yes", "y", "on") for value in values)


def how_to_sign(scheme: str) -> str:
    return f"set {GIVEN[scheme]}, or, for a public bucket, {PUBLIC[scheme][0]}=true"


def _has_google_credentials() -> bool:
    """Elsewhere than on Google's machines, obstore would ask for the machine's account for a minute."""
    is_set = any(name.startswith("GOOGLE_") for name in os.environ)
    return is_set or Path(GOOGLE_LOGIN).expanduser().exists() or any(map(_is_googles, METADATA_HOSTS))


def _is_googles(host: str) -> bool:
    connection = http.client.HTTPConnection(host, timeout=3)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
        return connection.getresponse().getheader("Metadata-Flavor") == "Google"
    return False
