"""Answers operators: how the server is, and restarts of its ranks."""

from __future__ import annotations

import shutil
import time
from typing import Any

from fastapi import APIRouter, Request

from partsong.calibration_files import any_calibration
from partsong.serving.access.own_jobs import check_operator
from partsong.serving.denoising.sessions import DenoiseSession
from partsong.serving.jobs import Job
from partsong.serving.server import Server

__all__ = ["router"]

router = APIRouter(prefix="/v1/operator")

#: Failed jobs that are shown, the latest first.
_ERRORS = 20


@router.get("")
async def state(request: Request) -> dict[str, Any]:
    """Says how models, users and the disk are, and what failed last."""
    check_operator(request)
    server: Server = request.app.state.server
    jobs = list(server.jobs.values())
    disk = shutil.disk_usage(server.folder)
    return {
        "object": "operator",
        "up_seconds": int(time.time()) - server.created,
        "leaves": server.leaves_at is not None,
        "models": [_model(server, name) for name in server.replicas]
        + [{"id": name, "kind": "text", "ready": text.ready} for name, text in server.texts.items()],
        "sessions": [_session(session) for session in server.sessions],
        "users": [_user(name, jobs) for name in sorted({job.user for job in jobs})],
        "disk": {"free": disk.free, "total": disk.total},
        "unwritten_jobs": len(server.unwritten),
        "measured": any_calibration(),
        "measuring": server.measuring.is_running,
        "measure_fault": server.measuring.fault,
        "errors": [_error(job) for job in reversed(jobs) if job.error is not None][:_ERRORS],
    }


@router.post("/calibrate", status_code=202)
async def calibrate(request: Request) -> dict[str, Any]:
    """Measures this machine, and plans anew for models whose strategy is the planner's."""
    check_operator(request)
    server: Server = request.app.state.server
    server.measuring.begin()
    return {"object": "operator.calibrate", "models": [model.name for model in server.models]}


@router.post("/restart", status_code=202)
async def restart(request: Request) -> dict[str, Any]:
    """Restarts the ranks of pictures and videos, one replica after the other, each when its jobs are done."""
    check_operator(request)
    server: Server = request.app.state.server
    server.restart()
    return {"object": "operator.restart", "models": list(server.replicas)}


def _model(server: Server, name: str) -> dict[str, Any]:
    replicas = server.replicas[name]
    states = [job.status for job in server.jobs.values() if job.model == name]
    return {
        "id": name,
        "kind": next(model.kind for model in server.models if model.name == name),
        "ready": bool(replicas.num_ready),
        "replicas": replicas.states(),
        "waiting": states.count("queued"),
        "running": states.count("in_progress"),
        "trouble": None if replicas.trouble is None else str(replicas.trouble),
    }


def _session(session: DenoiseSession) -> dict[str, Any]:
    names = ("id", "model", "strategy", "calls", "seconds")
    shown = session.as_json()
    return {**{name: shown[name] for name in names}, "user": session.user or None, "waits": not session.begun.done()}


def _user(name: str, jobs: list[Job]) -> dict[str, Any]:
    own = [job for job in jobs if job.user == name]
    return {
        "name": name or None,
        "jobs": len(own),
        "unfinished": sum(not job.has_ended for job in own),
        "seconds": round(sum(job.seconds or 0.0 for job in own), 3),
    }


def _error(job: Job) -> dict[str, Any]:
    ended = None if job.completed_at is None else int(job.completed_at)
    return {"job": job.id, "model": job.model, "user": job.user or None, "at": ended, **(job.error or {})}
