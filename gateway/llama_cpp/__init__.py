"""The routes of llama.cpp's server that editors and chat programs ask beside OpenAI's."""
