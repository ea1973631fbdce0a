"""Serve HTTP: map each path to what answers it, and write refusals."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from treadle_runtime.http.web import refuse_errors

from treadle_gateway.http.control import READ, RUN, Control, refuse
from treadle_gateway.http.fleet import Fleet
from treadle_gateway.http.openai_api import OpenaiApi
from treadle_gateway.http.sglang_api import SglangApi
from treadle_gateway.http.vllm_api import VllmApi
from treadle_gateway.order import CallerGone, Refused

Endpoint = Callable[[Request], Awaitable[Response]]
Paths = dict[str, tuple[Endpoint, list[str]]]
CLIENT_CLOSED = 499  # nginx' own status for it; nobody reads it
OPEN_PATHS = ("/health", "/health_generate")  # open to probes, which have no key

# vLLM's and prime-rl's own groups, which SGLang's processes cannot join.
VLLM_GROUPS = ("/init_weight_transfer_engine", "/init_broadcaster", "/collective_rpc")
NO_VLLM_GROUP = (
    "SGLang engines cannot join a vLLM weight-transfer group; save the weights and call "
    "/update_weights_from_disk, or join them with /init_weights_update_group"
)
ADAPTERS = (
    *("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter"),
    *("/unload_lora_adapter", "/v1/unload_lora_adapter"),
)
NO_ADAPTERS = (
    "the mesh serves one set of weights; merge the adapter, save it, and call "
    "/update_weights_from_disk"
)


class KeyCheck:
    """Middleware that refuses requests without the key, except probes of health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._wanted = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._wanted):
                refusal = Refused(
                    "Authorization: must be `Bearer KEY`, with the key of this gateway", 401
                )
                await write_refusal(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(
    sglang: SglangApi,
    openai: OpenaiApi,
    vllm: VllmApi,
    fleet: Fleet,
    control: Control,
    api_key: str,
) -> Starlette:
    """Return the application. api_key: empty: everybody may call."""
    routes = [
        *_routes("", _generation(sglang, openai, vllm)),
        *_routes("", _fleet(fleet, control)),
        *_routes("", _training(control)),
        Route("/workers", control.add_worker, methods=["POST"]),
        *_routes("/engines/{engine_id}", _engine(sglang, control)),
    ]
    middleware = [Middleware(KeyCheck, api_key=api_key)] if api_key else []
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            Refused: _refuse,
            CallerGone: _forget,
            HTTPException: refuse_errors(
                lambda status, words: write_refusal(Refused(words, status))
            ),
        },
    )


def _generation(sglang: SglangApi, openai: OpenaiApi, vllm: VllmApi) -> Paths:
    return {
        "/generate": (sglang.generate, ["POST", "PUT"]),
        "/v1/chat/completions": (openai.chat, ["POST"]),
        "/v1/completions": (openai.complete, ["POST"]),
        "/v1/responses": (openai.respond, ["POST"]),
        "/inference/v1/generate": (vllm.generate, ["POST"]),
        "/skyrl/v1/generate": (vllm.generate_with_experts, ["POST"]),
    }


def _fleet(fleet: Fleet, control: Control) -> Paths:
    return {
        "/v1/models": (fleet.models, ["GET"]),
        "/v1/loads": (fleet.loads, ["GET"]),
        "/model_info": (fleet.model_info, ["GET"]),
        "/get_model_info": (fleet.model_info, ["GET"]),
        "/server_info": (control.server_info, ["GET"]),
        "/get_server_info": (control.server_info, ["GET"]),
        "/get_world_size": (control.world_size, ["GET"]),
        "/health": (fleet.health, ["GET"]),
        "/health_generate": (fleet.health, ["GET"]),
        "/workers": (fleet.workers, ["GET"]),
        "/list_workers": (fleet.workers, ["GET"]),
        "/workers/{engine_id}": (control.remove_worker, ["DELETE"]),
        "/sessions/{session:path}": (fleet.close_session, ["DELETE"]),
        "/tokenize": (control.tokenize, ["POST"]),
        "/detokenize": (control.tokenize, ["POST"]),
        "/finish_session": (fleet.close_session, ["POST"]),
    }


def _training(control: Control) -> Paths:
    """Return the paths for trainers at the root, which are for all engines."""
    return {
        **_training_of_one(control),
        "/add_worker": (control.add_worker, ["POST"]),
        "/pause": (control.pause, ["POST"]),
        "/resume": (control.go_on, ["POST"]),
        "/reset_prefix_cache": (control.flush, ["POST"]),
        "/sleep": (control.sleep, ["POST"]),
        "/wake_up": (control.wake, ["POST"]),
        "/update_weights": (control.load_weights, ["POST"]),
        **dict.fromkeys(VLLM_GROUPS, (refuse(NO_VLLM_GROUP), ["POST"])),
        **dict.fromkeys(ADAPTERS, (refuse(NO_ADAPTERS), ["POST"])),
    }


def _training_of_one(control: Control) -> Paths:
    return {
        "/pause_generation": (control.pause, ["POST"]),
        "/continue_generation": (control.go_on, ["POST"]),
        "/flush_cache": (control.flush, ["GET", "POST"]),  # a GET flushes nothing
        "/abort_request": (control.abort, ["POST"]),
        "/update_weights_from_disk": (control.load_weights, ["POST"]),
        "/update_weights_from_{way}": (control.push_weights, ["POST"]),
        "/begin_weight_update": (control.begin_update, ["POST"]),
        "/end_weight_update": (control.end_update, ["POST"]),
        "/init_weights_update_group": (control.join_group, ["POST"]),
        "/destroy_weights_update_group": (control.leave_group, ["POST"]),
        "/release_memory_occupation": (control.sleep, ["POST"]),
        "/resume_memory_occupation": (control.wake, ["POST"]),
        "/get_weight_version": (control.weight_version, ["GET"]),
        "/update_weight_version": (
            refuse("name the version with the weights: weight_version"),
            ["POST"],
        ),
    }


def _engine(sglang: SglangApi, control: Control) -> Paths:
    """Return the paths below /engines/{engine_id}, as slime calls its workers. The mesh decides
    where a request generates."""
    return {
        "/generate": (sglang.generate, ["POST", "PUT"]),
        **_training_of_one(control),
        "/health": (control.health, ["GET"]),
        "/health_generate": (control.health, ["GET"]),
        "/v1/loads": (control.load, ["GET"]),
        **{f"/{path}": (control.pass_on(path), ["GET"]) for path in READ},
        **{f"/{path}": (control.pass_on(path), ["POST"]) for path in RUN},
    }


def _routes(prefix: str, paths: Paths) -> list[Route]:
    return [
        Route(prefix + path, endpoint, methods=methods)
        for path, (endpoint, methods) in paths.items()
    ]


async def _refuse(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refused)
    return write_refusal(refusal)


def write_refusal(refusal: Refused) -> Response:
    """Return a refusal in the form that both SGLang's and OpenAI's clients read."""
    error = {
        "message": str(refusal),
        "type": "invalid_request_error" if refusal.status < 500 else "server_error",
    }
    return JSONResponse({"error": error | {"code": refusal.code}}, refusal.status)


async def _forget(request: Request, gone: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
