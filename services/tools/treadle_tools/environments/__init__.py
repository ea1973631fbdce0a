"""The environments that come with the service. Imported inside the sandbox only; their libraries are the extra
`tools`.
"""
