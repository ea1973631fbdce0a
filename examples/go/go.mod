module treadle-agent

go 1.26.0

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260921155816-b14227669459
	google.golang.org/grpc v1.82.0
	google.golang.org/protobuf v1.36.11
)
