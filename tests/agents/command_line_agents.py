"""How each command-line agent is started against a server, as docs/guide/clients.md describes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from conftest import FILE, INSTALLED, MODULES, NODE, Place

MODEL = "default"
CLAUDE = MODULES / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
CODEX = MODULES / "@openai" / "codex-linux-x64" / "vendor" / "x86_64-unknown-linux-musl" / "bin" / "codex"
OPENCODE = MODULES / "opencode-linux-x64" / "bin" / "opencode"
QWEN = MODULES / "@qwen-code" / "qwen-code" / "cli.js"
AIDER = INSTALLED / "aider" / "bin" / "aider"
CONTEXT = 32_768

Start = tuple[list[object], dict[str, str]]
"""A command, without the prompt, and its environment."""


@dataclass(frozen=True)
class Agent:
    name: str
    route: str
    prepare: Callable[[Place, str, str], Start]
    """Writes the settings for the address and the key of a server."""
    prepare_talk: Callable[[Place, str, str], Start] | None = None
    """The same, without tools that run commands or write files: a small model may call anything."""
    task: str = "read it"
    resume: tuple[str, ...] = ()
    """What follows the command to continue its last conversation."""

    @property
    def prompt(self) -> str:
        return f"{self.name.partition(' with ')[0]}, {self.task}"


def claude_code(place: Place, url: str, key: str, *, is_light: bool = True) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        # It keeps room for a whole answer, and would replace a conversation that is continued by a summary.
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
    }
    return [CLAUDE, *(["--bare"] if is_light else []), "--allowedTools", "Bash", "-p"], environment


def claude_code_default(place: Place, url: str, key: str) -> Start:
    return claude_code(place, url, key, is_light=False)


def claude_code_talk(place: Place, url: str, key: str) -> Start:
    _, environment = claude_code(place, url, key)
    return [CLAUDE, "--bare", "--tools", "", "-p"], environment


CODEX_PROVIDER = f"""
model = "{MODEL}"
model_provider = "weft"
model_context_window = {CONTEXT}
check_for_update_on_startup = false
LIGHT
[analytics]
enabled = false
[model_providers.weft]
name = "weft"
base_url = "URL/v1"
wire_api = "responses"
env_key = "WEFT_API_KEY"
request_max_retries = 4
stream_max_retries = 4
FEATURES
"""
CODEX_LIGHT = """
model_instructions_file = "INSTRUCTIONS"
web_search = "disabled"
include_permissions_instructions = false
include_environment_context = false
include_apps_instructions = false
"""
CODEX_FEATURES = """
[features]
goals = false
multi_agent = false
apps = false
plugins = false
remote_plugin = false
skill_search = false
tool_suggest = false
shell_snapshot = false
view_image = false
[skills]
include_instructions = false
[skills.bundled]
enabled = false
"""


def codex(place: Place, url: str, key: str, *, is_light: bool = True) -> Start:
    place.write("instructions.md", "You are a coding agent. Use the tools.")
    settings = CODEX_PROVIDER.replace("LIGHT", CODEX_LIGHT if is_light else "")
    settings = settings.replace("FEATURES", CODEX_FEATURES if is_light else "")
    settings = settings.replace("INSTRUCTIONS", str(place.home / "instructions.md"))
    place.write(".codex/config.toml", settings.replace("URL", url))
    # The agent's own sandbox needs rights that a container may not give; the folder is a temporary one.
    command = [CODEX, "exec", "--skip-git-repo-check", "-s", "danger-full-access"]
    return command, {"WEFT_API_KEY": key}


def codex_talk(place: Place, url: str, key: str) -> Start:
    command, environment = codex(place, url, key)
    return [*command[:-1], "read-only"], environment


def codex_default(place: Place, url: str, key: str) -> Start:
    return codex(place, url, key, is_light=False)


def codex_oss(place: Place, url: str, key: str) -> Start:
    """With the provider for local servers, which asks like a client of Ollama first and sends no key."""
    command: list[object] = [CODEX, "exec", "--oss", "--local-provider", "ollama", "-m", MODEL]
    command += ["--skip-git-repo-check", "-s", "danger-full-access"]
    return command, {"CODEX_OSS_BASE_URL": f"{url}/v1"}


def opencode_with(package: str, *more: str) -> Callable[[Place, str, str], Start]:
    def prepare(place: Place, url: str, key: str) -> Start:
        model = {"name": MODEL, "limit": {"context": CONTEXT, "output": 4096}}
        provider = {
            "npm": package,
            "name": "weft",
            "options": {"baseURL": f"{url}/v1", "apiKey": key},
            "models": {MODEL: model},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "provider": {"weft": provider},
            "model": f"weft/{MODEL}",
            "small_model": f"weft/{MODEL}",
            "agent": {
                "talk": {"mode": "primary", "prompt": "You are a helpful assistant.", "tools": {"*": False}}
            },
        }
        place.write(".config/opencode/opencode.json", json.dumps(settings))
        return [OPENCODE, "run", "--title", "test", *more], {}

    return prepare


def opencode_talk(package: str) -> Callable[[Place, str, str], Start]:
    return opencode_with(package, "--agent", "talk")


def qwen_code(place: Place, url: str, key: str) -> Start:
    environment = {
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_MODEL": MODEL,
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }
    return [NODE, QWEN, "--auth-type", "openai", "--yolo"], environment


def qwen_code_talk(place: Place, url: str, key: str) -> Start:
    _, environment = qwen_code(place, url, key)
    command: list[object] = [NODE, QWEN, "--auth-type", "openai", "--bare", "--approval-mode", "plan"]
    command += ["--system-prompt", "You are a helpful assistant.", "--max-tool-calls", "0"]
    return command, {**environment, "QWEN_CODE_MAX_OUTPUT_TOKENS": "200"}


def aider(place: Place, url: str, key: str) -> Start:
    command: list[object] = [AIDER, "--model", f"openai/{MODEL}", "--no-check-update", "--no-analytics"]
    command += ["--no-show-model-warnings", "--yes-always", "--no-git", "--no-pretty", "--no-fancy-input"]
    command += ["--edit-format", "whole", FILE, "--message"]
    return command, {"OPENAI_API_KEY": key, "OPENAI_API_BASE": f"{url}/v1"}


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPATIBLE, OPENAI, ANTHROPIC = "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"
CONTINUE, RESUME = ("--continue",), ("resume", "--last")
AGENTS = (
    Agent("Claude Code", MESSAGES, claude_code, claude_code_talk, resume=CONTINUE),
    Agent("Claude Code with its default prompt", MESSAGES, claude_code_default, resume=CONTINUE),
    Agent("Codex", RESPONSES, codex, codex_talk, resume=RESUME),
    Agent("Codex with its default prompt", RESPONSES, codex_default, resume=RESUME),
    Agent("opencode", CHAT, opencode_with(COMPATIBLE), opencode_talk(COMPATIBLE), resume=CONTINUE),
    Agent(
        "opencode with @ai-sdk/openai",
        RESPONSES,
        opencode_with(OPENAI),
        opencode_talk(OPENAI),
        resume=CONTINUE,
    ),
    Agent(
        "opencode with @ai-sdk/anthropic",
        MESSAGES,
        opencode_with(ANTHROPIC),
        opencode_talk(ANTHROPIC),
        resume=CONTINUE,
    ),
    Agent("qwen-code", CHAT, qwen_code, qwen_code_talk, resume=CONTINUE),
)
LOCAL = Agent("Codex with --oss", RESPONSES, codex_oss)
EDITOR = Agent("aider", CHAT, aider, task="change it")
"""It calls no tools: it edits a file by an answer."""
