"""Tools and rewards that run elsewhere: any HTTP function, such as a Knative or OpenFaaS service."""
