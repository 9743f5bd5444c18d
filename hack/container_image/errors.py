"""What went wrong with the image, and how to mend it, in one sentence for the reader."""


class ImageError(Exception):
    """The image cannot be built; the message names the reason and the remedy."""
