"""Speak HTTP: serve an application beside a service's gRPC server, and call SGLang's server."""
