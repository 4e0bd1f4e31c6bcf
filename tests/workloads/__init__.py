"""Real third-party networks with padded rows, each declared through the public interface of spangraph.

A module has `build()`, which gives a `Workload`, and `reference(inputs)`, which gives the rows that the cut must meet:
where it can, what the third-party code returns for each row alone, unpadded. Weights come inside the packages or are
random with a fixed seed; nothing is downloaded.

| module | weights | what it exercises | declared |
| --- | --- | --- | --- |
| silero_segments | shipped | several spans a row, row values, an output that aliases an input, LSTM | by the root |
| torchcrepe_voiced | shipped | starts above 0, a withheld row | from outside, by index |
| mtcnn_pnet | shipped | two outputs, height and width | from outside, by index |
| encodec_decode | random | causal codec; as published also int buffers that are read | from outside, by index |
| wav2vec2_frames | random | an untouched Hugging Face model and its ModelOutput, dim 1 | from outside, by field |
| vits_tts | random | predicted lengths, host reads that only feed assertions, ModelOutput | from outside, by field |
| hifigan_mel | random | outputs that derive from a submodule's | by a submodule |
| vae_decode | random | height and width, another method than forward | a submodule, from outside |
| swin2sr_x2 | random | height and width | from outside, by index |
"""
