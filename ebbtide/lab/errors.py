"""Errors of a lab and of readings taken in it; the text of each is one sentence for the user."""

from __future__ import annotations

from ebbtide.errors import EbbError


class LabError(EbbError):
    """Base of the errors of `ebbtide.lab`."""


class ImageError(LabError):
    """The guest image could not be built."""


class MissingTool(ImageError):
    """A program that the build needs is not installed."""

    def __init__(self, tool: str, package: str) -> None:
        super().__init__(f"{tool} is not installed; on Debian: apt-get install {package}")


class LinkError(LabError):
    """The lab channel of a guest gave no answer, or not one that can be understood."""


class ChannelOperationFailed(LinkError):
    """The guest answered that an operation of the lab channel failed."""


class ReadingError(LabError):
    """A reading that does not go through the agents could not be taken."""
