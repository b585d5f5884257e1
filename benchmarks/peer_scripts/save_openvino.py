"""Has OpenVINO GenAI read a GGUF file and save it in OpenVINO's own form beside it: FILE."""

import sys

import openvino_genai

scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1
openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"enable_save_ov_model": True})
