"""The one version number: of both wheels, the images, the bundle of protos, and what a running service says."""

VERSION = "0.2.0"
