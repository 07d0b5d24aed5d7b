"""What takes images in, for tests of other things."""

from __future__ import annotations

from nats.aio.client import Client

from gateway.media.fetch import AllowedHosts, ImageFetcher
from gateway.media.intake import ImageIntake, ImageLimits
from shared.media_store import MediaStore


def image_intake(nats: Client) -> ImageIntake:
    return ImageIntake(MediaStore(nats.jetstream()), ImageLimits(), ImageFetcher(AllowedHosts(), 1 << 20))
