"""What can go wrong in a lab."""

from __future__ import annotations


class LabError(Exception):
    """Base of the errors of `ebb.lab`; the text is one sentence for the user."""


class ImageError(LabError):
    """The guest image could not be built."""


class MissingTool(ImageError):
    """A program that the build needs is not installed."""

    def __init__(self, tool: str, package: str) -> None:
        super().__init__(f"{tool} is not installed; on Debian: apt-get install {package}")
        self.tool = tool
        self.package = package


class LinkError(LabError):
    """The lab channel of a guest gave no answer, or not one that can be understood."""


class OperationFailed(LinkError):
    """The guest answered that an operation of the lab channel failed."""
