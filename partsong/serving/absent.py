"""Says of well-known endpoints that this server has not got them, so that clients that probe know at once."""

from __future__ import annotations

from partsong.serving.errors import ApiError, shortened

__all__ = ["no_answer"]

#: Endpoints of the OpenAI API and its relatives, and what they would need; those below one are named with it.
_ABSENT = {
    "/v1/assistants": "assistants",
    "/v1/audio": "models of speech",
    "/v1/batches": "batches",
    "/v1/conversations": "conversations; /v1/responses has previous_response_id",
    "/v1/embeddings": "models of embeddings",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images/variations": "variations; /v1/images/edits takes a picture",
    "/v1/moderations": "models of moderation",
    "/v1/realtime": "realtime sessions",
    "/v1/rerank": "models that rank",
    "/v1/threads": "threads; /v1/responses has previous_response_id",
    "/v1/vector_stores": "vector stores",
}


def no_answer(status: int, method: str, path: str, detail: str) -> ApiError:
    """Returns the error for a request that no endpoint takes.

    Args:
        status: of HTTP.
        method: of the request.
        path: below the root of the server.
        detail: what the web framework says of it.
    """
    for begin, what in _ABSENT.items():
        if path == begin or path.startswith(f"{begin}/"):
            message = f"{method} {shortened(path)}: this server has no {what}"
            return ApiError(404, message, code="unsupported_endpoint", is_final=True)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    return ApiError(status, f"{method} {shortened(path)}: {detail}", code=code)
