"""Driver of another embedding engine. Arguments: KIND MODEL THREADS WORK. KIND: sentence-transformers, onnxruntime, llama.cpp.

MODEL is the folder of all-MiniLM-L6-v2, for llama.cpp a GGUF file. Each line of standard input has texts. The response
has the seconds of each call and the vectors. Texts go in as strings: every engine also tokenises.
"""

import base64
import json
import os
import sys
import time

import numpy as np

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries may print to standard output, which only answers may use
BATCH = 32
LONGEST = 256


def main(kind, model, threads, work):
    opened = {"sentence-transformers": sentence_transformers, "onnxruntime": onnxruntime, "llama.cpp": llama}[
        kind
    ](model, threads, work)
    for line in sys.stdin:
        asked = json.loads(line)
        calls = [[text] for text in asked["texts"]] if asked["one_by_one"] else [asked["texts"]]
        seconds, found = [], []
        for texts in calls:
            began = time.perf_counter()
            found.append(np.asarray(opened(texts), "<f4"))
            seconds.append(time.perf_counter() - began)
        vectors = base64.b64encode(np.concatenate(found).tobytes()).decode()
        print(json.dumps({"seconds": seconds, "vectors": vectors}), file=ANSWERS, flush=True)


def sentence_transformers(model, threads, work):
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    opened = SentenceTransformer(model, device="cpu")
    return lambda texts: opened.encode(texts, batch_size=BATCH, normalize_embeddings=True)


def onnxruntime(model, threads, work):
    """The model with fused attention and 8-bit weights, exported once."""
    import onnxruntime as ort
    from tokenizers import Tokenizer

    path = os.path.join(work, "int8.onnx")
    if not os.path.exists(path):
        export(model, work, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    tokenizer = Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()  # to the longest of a batch

    def run(texts):
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), 384), np.float32)
        for first in range(0, len(order), BATCH):
            some = order[first : first + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in some])
            mask = np.array([one.attention_mask for one in encoded], np.int64)
            inputs = {
                "input_ids": np.array([one.ids for one in encoded], np.int64),
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(mask),
            }
            rows = session.run(None, {name: value for name, value in inputs.items() if name in wanted})[0]
            pooled = (rows * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
            vectors[some] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return run


def export(model, work, path):
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    opened = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = opened

        def forward(self, input_ids, attention_mask, token_type_ids):
            added = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
            hidden = self.model.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
            return self.model.encoder(hidden, attention_mask=added)[0]

    example = torch.ones(2, 8, dtype=torch.long)
    names = ("input_ids", "attention_mask", "token_type_ids")
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "rows")}
    plain, fused = os.path.join(work, "f32.onnx"), os.path.join(work, "fused.onnx")
    torch.onnx.export(
        Rows(), (example,) * 3, plain, input_names=names, output_names=("rows",), dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
    optimizer.optimize_model(plain, "bert", num_heads=12, hidden_size=384).save_model_to_file(fused)
    # Fused operators have no shape inference, so the quantiser needs the type of their outputs.
    extra = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(fused, path, weight_type=QuantType.QInt8, extra_options=extra)


def llama(model, threads, work):
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.embedding = True
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512 * BATCH
    parameters.n_parallel = BATCH
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def run(texts):
        answer = server.handle_embeddings({"input": texts})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        return [one["embedding"] for one in sorted(answer["data"], key=lambda one: one["index"])]

    return run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
