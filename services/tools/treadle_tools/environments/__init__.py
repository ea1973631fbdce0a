"""The environments that come with the service, imported inside the sandbox only. Their libraries: extra `tools`."""
