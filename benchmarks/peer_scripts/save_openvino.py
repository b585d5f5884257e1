"""Converts a GGUF file to OpenVINO's format, beside the file. Argument: FILE."""

import sys

import openvino_genai

scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1
openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"enable_save_ov_model": True})
